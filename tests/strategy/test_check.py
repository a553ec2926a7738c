"""A captured step that computes something else than the step is refused before training; one that agrees is not.

The plain step draws what the graph draws, whatever it draws with; where it cannot, nothing is compared.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.errors import CaptureError
from lightning_pipe.strategy.checks import check
from lightning_pipe.strategy.checks.check import Incomparable, differences
from lightning_pipe.strategy.start import mapped, room
from models.parity import make_loader, make_module
from ranks.world import Raised, World
from strategy.built_late import Late
from strategy.fits import checked, make_trainer, on_host
from strategy.small import Small, assert_as_on_one_device, loader, run

SAMPLES, WIDTH = 4, 6


class Chain(pl.LightningModule):
    """Linear layers with something between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = F.relu) -> None:
        super().__init__()
        self.layers, self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), between

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for layer in self.layers:
            batch = self.between(layer(batch))
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Deceptive(nn.Module):
    """Double what is given, but only when nobody looks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if torch.compiler.is_compiling() else 2 * x


class Counting:
    """Count calls where nobody looks for state: in a file."""

    def __init__(self) -> None:
        handle, self.file = tempfile.mkstemp()
        os.close(handle)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with open(self.file, "a") as file:
            file.write(".")
        return x * os.path.getsize(self.file)


WRONG = {"joint": Deceptive, "replay": Counting}


def fit_wrong(capture: str, **options: Any) -> list[float]:
    """Fit a module whose captured step is another; a worker function."""
    torch.manual_seed(0)
    module = Chain(WRONG[capture]())
    batches = DataLoader(torch.randn(8, WIDTH), batch_size=8)
    trainer = make_trainer(checked(capture=capture, microbatches=2, **options), max_steps=1)
    trainer.fit(module, batches)
    return [float(p.detach().sum()) for p in module.parameters()]


@pytest.mark.parametrize("capture", WRONG)
def test_a_captured_step_that_is_wrong_is_refused_on_every_rank(capture):
    advice = 'Set capture="replay"' if capture == "joint" else "Please report"
    samples = 4 if capture == "joint" else 8  # as replay sees that a layer is given other numbers for parts of a batch
    for result in World(2).results(fit_wrong, capture):
        assert isinstance(result, Raised) and result.kind == "CaptureError", result
        for words in (
            f"Chain.training_step, captured by the route {capture}, gives other results",
            f"on the first micro-batch ({samples} samples, the same random numbers) its loss is ",
            "and the gradient of layers.",
            ": Linear) has ",
            "rounding in float32 explains 3.5e-04",
            advice,
            "check=false",
        ):
            assert words in result.text, f"{words!r} is missing in {result.text}"


def twice_while_compiling(wanted: bool) -> int:
    """Return a factor that only a trace is told, so that its graph is wrong."""
    return 1 + (wanted and torch.compiler.is_compiling())


class DeceptiveLater(Small):
    """Steps whose graphs are wrong, but for the first one of training."""

    validation = staticmethod(lambda: loader(12, 4, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * twice_while_compiling(self.current_epoch > 0)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch) * twice_while_compiling(True))


def fit_later(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    return run(DeceptiveLater, options)


def test_graphs_of_later_epochs_and_of_validation_are_compared_too():
    assert_as_on_one_device(fit_later, "", {"layout": "1-1", "microbatches": 2, "check": True})


def test_the_check_can_be_switched_off():
    one, other = World(2).run(fit_wrong_unchecked)
    assert one == other


def fit_wrong_unchecked() -> list[float]:
    return fit_wrong("joint", check=False)


def test_agreement_is_one_line_of_the_log(caplog):
    with caplog.at_level("INFO", logger="lightning_pipe"):
        trainer = make_trainer(checked(microbatches=2, cache="off"), max_steps=1)
        trainer.fit(Chain(), DataLoader(torch.randn(8, WIDTH), batch_size=8))
    assert sum("agrees with the plain step on the first micro-batch of 4 samples" in m for m in caplog.messages) == 1


def compared(module: pl.LightningModule, batch: torch.Tensor):
    """Capture the step and compare it with the plain one."""
    request = Request(module, "training_step", flatten(batch)[1], samples=SAMPLES)
    return differences(capture_step(request), request, [batch], samples=SAMPLES, seed=3)


def attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.reshape(len(x), 1, 2, WIDTH // 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3).reshape(x.shape)


def one_after_the_other(*draws: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: list(accumulate(draws, lambda given, draw: draw(given), initial=x))[-1]


RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": one_after_the_other(
        F.dropout,
        lambda x: F.dropout(x + 0.0, p=0.2, inplace=True),
        lambda x: torch.dropout(x, 0.4, True),
        lambda x: F.dropout(x.t()).t(),
        lambda x: F.dropout1d(x[:, :, None]).squeeze(2),
        F.alpha_dropout,
    ),
    "attention": attention,
    "distribution": lambda x: torch.distributions.Normal(x, x.exp()).rsample(),
    "others": one_after_the_other(
        lambda x: F.dropout(x + torch.randn_like(x)),
        lambda x: x * torch.empty_like(x).bernoulli_(0.7),
        lambda x: x * torch.rand(x.size(0), 1),
        lambda x: x[torch.randperm(x.size(0))],
        lambda x: F.rrelu(x, training=True),
        lambda x: x * torch.multinomial(x.softmax(1), 1),
        F.gumbel_softmax,
    ),
}


@pytest.mark.parametrize("name", RANDOM)
def test_the_plain_step_draws_what_the_graph_draws(name):
    torch.manual_seed(0)
    module, batch = Chain(RANDOM[name]).train(), torch.randn(SAMPLES, WIDTH)
    before = torch.get_rng_state()
    for difference in compared(module, batch):
        assert difference.relative <= difference.allowed, difference
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("plain", "traced", "words"),
    [
        (F.dropout, F.relu, "draw 1 is bernoulli in the plain step and nothing in the graph"),
        (F.relu, F.dropout, "it makes 0 draws in the plain step and 3 in the graph"),
        (F.gumbel_softmax, F.dropout, "draw 1 is exponential in the plain step and native_dropout in the graph"),
    ],
)
def test_steps_that_draw_otherwise_are_not_compared(plain, traced, words):
    def between(x: torch.Tensor) -> torch.Tensor:
        return traced(x) if torch.compiler.is_compiling() else plain(x)

    with pytest.raises(Incomparable, match=words):
        compared(Chain(between), torch.randn(SAMPLES, WIDTH))


def raises(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no mask yet")


def test_a_step_that_is_not_ready_before_training_is_not_compared():
    with pytest.raises(Incomparable, match="before training the plain step raises ValueError: no mask yet"):
        compared(Chain(lambda x: x if torch.compiler.is_compiling() else raises(x)), torch.randn(SAMPLES, WIDTH))


@torch.library.custom_op("lightning_pipe_test::fails", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("only shapes are known")


@fails.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_graph_that_fails_where_the_plain_step_does_not_is_refused():
    def between(x: torch.Tensor) -> torch.Tensor:
        return x * fails(x.detach()) if torch.compiler.is_compiling() else x

    with pytest.raises(CaptureError, match=r"raises ValueError on the first .* only shapes are known.* Set capture="):
        compared(Chain(between), torch.randn(SAMPLES, WIDTH))


def test_a_module_without_memory_is_not_compared():
    with pytest.raises(Incomparable, match="the module is on the meta device"):
        compared(Chain().to("meta"), torch.randn(SAMPLES, WIDTH))


def test_what_rounding_leaves_of_a_gradient_is_not_a_difference():
    """A bias before a batch norm has a gradient of zero, but for rounding."""
    norm = nn.BatchNorm1d(WIDTH)
    loss, worst, _ = compared(Chain(norm), torch.randn(SAMPLES, WIDTH))
    assert max(loss.relative, worst.relative) <= worst.allowed
    assert int(norm.num_batches_tracked) == 0 and torch.equal(norm.running_mean, torch.zeros(WIDTH))


def test_a_module_that_is_large_for_a_host_is_not_compared(monkeypatch):
    monkeypatch.setattr(check, "_MOST_ON_HOST_BYTES", 100)
    with pytest.raises(Incomparable, match=r"its parameters take .* are for modules up to 100 B"):
        compared(Chain(), torch.randn(SAMPLES, WIDTH))


@pytest.fixture
def short_of_memory(monkeypatch) -> list[torch.Tensor]:
    """Leave so little memory that values and gradients lie in files; list what was put there."""
    return shorten(monkeypatch)


def shorten(patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    made, make = [], mapped.MappedTensors._made

    def listing(files: mapped.MappedTensors, like: torch.Tensor) -> torch.Tensor:
        made.append(make(files, like))
        return made[-1]

    patch.setattr(mapped, "_SMALL_BYTES", 0)
    patch.setattr(mapped.MappedTensors, "_made", listing)
    patch.setattr(room, "_GRADIENTS", 1 << 40)  # times the parameters, which no memory has room for
    patch.setattr(mapped.MappedTensors, "free_bytes", lambda _: 1 << 62)
    return made


def test_gradients_in_files_are_those_in_memory(short_of_memory):
    module, batch = Chain(), torch.randn(SAMPLES, WIDTH)
    loss, worst, _ = compared(module, batch)
    assert len(short_of_memory) == 2 * 6, "both runs of each of the parameters"
    assert any(gradient.any() for gradient in short_of_memory)
    assert loss.relative <= loss.allowed and worst.relative <= worst.allowed
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_difference_is_seen_in_files_too(short_of_memory):
    loss, worst, _ = compared(Chain(Deceptive()), torch.randn(SAMPLES, WIDTH))
    assert max(loss.relative, worst.relative) > worst.allowed and short_of_memory


@pytest.mark.parametrize(
    ("memory", "disk", "words"),
    [
        (2000, 0, r"take .* of memory and 1008 B of files; there is room for 1.95 KiB in memory, and for 0 B in "),
        (400, 1 << 40, r"there is room for 400 B in memory"),
    ],
)
def test_a_step_that_there_is_no_room_for_is_not_compared(memory, disk, words, monkeypatch, tmp_path):
    monkeypatch.setattr(mapped.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(mapped.MappedTensors, "free_bytes", lambda _: disk)
    monkeypatch.setattr(room, "room_bytes", lambda: memory)
    with pytest.raises(Incomparable, match=words):
        compared(Chain(), torch.randn(SAMPLES, WIDTH))
    assert not [*tmp_path.iterdir()]


def test_a_step_for_which_ranks_would_wait_too_long_is_not_compared():
    module, batch = Chain(), torch.randn(SAMPLES, WIDTH)
    request = Request(module, "training_step", flatten(batch)[1], samples=SAMPLES)
    with pytest.raises(Incomparable, match="it would take about 0 s, and ranks wait for 0 s"):
        differences(capture_step(request), request, [batch], samples=SAMPLES, seed=3, deadline_s=0.0)
    assert all(parameter.grad is None for parameter in module.parameters())


LATE = {"joint": "gpt_tied", "replay": "dict_batch"}


def fit_late(capture: str, short: bool) -> tuple[list[float], int, list[str]]:
    """Fit a module that is built late; return its parameters, how many tensors were in files, and what was said."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        made = shorten(patch) if short else []
        patch.setattr(check.log, "info", lambda text, *args: said.append(text % args))
        torch.manual_seed(5)
        trainer = make_trainer(checked(capture=capture, microbatches=2, cache="off"), max_steps=2)
        module = Late(lambda: make_module(LATE[capture]))
        trainer.fit(module, make_loader(LATE[capture]))
        with trainer.strategy.whole_module():
            return [float(p.detach().double().norm()) for p in module.parameters()], len(made), said


@pytest.mark.sampled(every=2)
@on_host("room is that of the host")
@pytest.mark.parametrize("capture", LATE)
def test_a_module_that_no_rank_has_room_for_is_checked_all_the_same(capture):
    usual = World(2).run(fit_late, capture, False)
    short = World(2).run(fit_late, capture, True)
    for (values, made, said), (expected, _, _) in zip(short, usual, strict=True):
        assert values == expected
        assert (made > 3 * len(values) * 0.5) == bool(said), "rank 0 makes the check"
    assert sum("agrees with the plain step" in line for _, _, said in short for line in said) == 1
