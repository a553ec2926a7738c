"""A trace with symbols for lengths: where it holds, it is the step at these lengths; where it does not, it says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from capture.sequential import run_stages
from lightning_pipe.capture import Capture, Request, capture_step, flatten
from lightning_pipe.capture.graphs.lengths import changed_sizes
from lightning_pipe.capture.steps.batch import Leaf, Structure
from lightning_pipe.capture.steps.record import Sized
from lightning_pipe.capture.steps.stage_program import RandomKey
from slow import slow_but

SAMPLES, WIDTH, WORDS, MOST = 4, 8, 11, 64
KEY = RandomKey(seed=1, step=0, microbatch=0)
LENGTHS = (9, 12, 17, 3, 1)  # the first is traced as it is, the second with symbols


class Net(pl.LightningModule):
    """Embeds words, mixes them somehow, and predicts a number per sample."""

    def __init__(self, mix: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(MOST, WIDTH)
        self.heads, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, stride=2)
        self.tensor, self.mix = torch.arange(MOST).double(), mix
        self.double()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        h = torch.tanh(self.mix(self, self.words(batch)))
        self.log("length", float(batch.shape[1]) if self.mix is float_size else batch.shape[1])
        self.log("elements", batch.numel())
        return self.dense(h).square().mean()


def attention(net: Net, h: torch.Tensor) -> torch.Tensor:
    h = h + net.places(torch.arange(h.shape[1]))
    q, k, v = net.heads(h).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def masked(net: Net, h: torch.Tensor) -> torch.Tensor:
    length = h.size(1)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
    return torch.softmax((h @ h.transpose(1, 2) / length**0.5).masked_fill(mask, float("-inf")), -1) @ h


def scaled(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h * (1.0 / h.shape[1]) + h.shape[1] / 7 + h.numel() // 3


def branching(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if h.shape[1] > 10 else h


def halves(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h[:, : h.shape[1] // 2].flip(1) * 3 if h.shape[1] % 2 == 0 else h[:, 1:]


def windows(net: Net, h: torch.Tensor) -> torch.Tensor:
    return F.pad(h, (0, 0, 0, -h.shape[1] % 4)).unflatten(1, (-1, 4)).mean(2)


def counted(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h * sum(1 for _ in range(h.shape[1]))


def listed(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h + torch.tensor([float(i) for i in range(h.shape[1])], dtype=h.dtype)[:, None]


def float_size(net: Net, h: torch.Tensor) -> torch.Tensor:
    return h


def flattened(net: Net, h: torch.Tensor) -> torch.Tensor:
    return F.dropout(net.dense(h.flatten(0, 1)), 0.25).unflatten(0, (-1, h.shape[1])).transpose(1, 2).mean(-1)


MIXES: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "attention": attention,
    "masked": masked,
    "recurrent": lambda net, h: net.recurrent(h)[0],
    "convolution": lambda net, h: net.convolution(h.transpose(1, 2)).transpose(1, 2),
    "scaled": scaled,
    "branching": branching,
    "halves": halves,
    "windows": windows,
    "counted": counted,
    "listed": listed,
    "float_size": float_size,
    "flattened": flattened,
    "sorted": lambda net, h: h.sort(1).values.cumsum(1),
    "interpolated": lambda net, h: F.interpolate(h.transpose(1, 2), size=6, mode="linear").transpose(1, 2),
    "table": lambda net, h: h * net.tensor[: h.shape[1]][:, None],
}
ANY_LENGTH = {"attention", "masked", "convolution", "scaled", "flattened", "sorted"}  # one trace for 3 and more


def words(length: int, samples: int = SAMPLES) -> torch.Tensor:
    return torch.randint(0, WORDS, (samples, length), generator=torch.Generator().manual_seed(length))


def request(module: Net, length: int) -> Request:
    return Request(module, "training_step", flatten(words(length))[1], samples=SAMPLES)


def outcome(capture: Capture, module: Net, batch: torch.Tensor) -> tuple[Any, ...]:
    """Return loss, gradients and what is logged for a batch, over two stages."""
    samples = len(batch)
    (leaves, _) = capture.with_totals((batch,), cut=(True,), sizes=(samples,), buffers={})
    split = capture.split((len(capture.graph.nodes) // 2,))
    results, gradients = run_stages(split, copy.deepcopy(module), leaves, key=KEY, weight=1.0)
    said = [one.value.of(samples) if isinstance(one.value, Sized) else one.value for one in capture.record.calls]
    return results[capture.record.loss], gradients, said


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", slow_but(MIXES.keys() - {"recurrent"}, MIXES))
def test_a_trace_with_symbols_is_the_step_at_every_length_that_it_holds_for(name: str) -> None:
    module = Net(MIXES[name])
    first, second, *others = LENGTHS
    one, two = (request(module, length) for length in (first, second))
    general = capture_step(replace(two, lengths=changed_sizes(one.structure, two.structure, batch_dim=0)))
    found = {length: general.for_lengths(request(module, length)) for length in (first, second, *others)}
    for length, capture in found.items():
        if capture is None:
            continue
        direct = capture_step(request(module, length))
        for samples in (SAMPLES, 2):
            batch = words(length, samples)
            loss, gradients, said = outcome(capture, module, batch)
            expected_loss, expected, expected_said = outcome(direct, module, batch)
            assert torch.equal(loss, expected_loss)
            assert gradients.keys() == expected.keys()
            assert all(torch.equal(gradients[key], expected[key]) for key in expected)
            assert said == expected_said == [length, length * samples]
    held = {length for length, capture in found.items() if capture is not None}
    assert 1 not in held
    if name in ANY_LENGTH:
        assert held >= {length for length in LENGTHS if length > 2}
    if name in ("counted", "listed"):
        assert held <= {second}
    if name == "branching":
        assert held == {17, 12}


def test_sizes_that_differ_by_coincidence_are_symbols_of_their_own() -> None:
    """Two sequences that have the same length in the traced batch have other lengths in others."""

    class Pair(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            one, two = batch
            return self.layer(one).mean((1, 2)).square().mean() + self.layer(two).sum((1, 2)).square().mean()

    def structure(one: int, two: int) -> Structure:
        return flatten((torch.zeros(SAMPLES, one, WIDTH), torch.zeros(SAMPLES, two, WIDTH)))[1]

    module = Pair()
    lengths = changed_sizes(structure(4, 4), structure(5, 7), batch_dim=0)
    assert lengths == {(0, 1), (1, 1)}
    wanted = Request(module, "training_step", structure(4, 4), samples=SAMPLES, lengths=lengths)
    general = capture_step(wanted)
    for sizes in ((6, 3), (4, 4), (3, 6)):
        found = general.for_lengths(replace(wanted, structure=structure(*sizes)))
        assert found is not None
        leaves = tuple(torch.randn(SAMPLES, size, WIDTH) for size in sizes)
        results, _ = run_stages(found.split(()), module, leaves, key=KEY, weight=1.0)
        torch.testing.assert_close(results[found.record.loss], module.training_step(leaves, 0).detach())


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ([(4, 3)], [(2, 3)], frozenset()),
        ([(4, 3), (4,)], [(4, 5), (4,)], {(0, 1)}),
        ([(4, 3)], [(4, 3, 1)], None),
        ([(4, 3)], [(4, 3), (4,)], None),
    ],
)
def test_changed_sizes(one: Any, two: Any, expected: Any) -> None:
    structures = [Structure(None, tuple(Leaf(shape, torch.float32) for shape in shapes)) for shapes in (one, two)]
    assert changed_sizes(*structures, batch_dim=0) == expected
