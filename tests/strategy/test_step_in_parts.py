"""Parameters step as soon as their own gradients are summed, where nothing needs all; training is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.runtime.exchanges.gradients import Gradients
from lightning_pipe.strategy.steps.runner import Runner
from ranks.world import World
from strategy.fits import dapple, make_trainer

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.05, foreach=True, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05),
}
STEPS = 5


class Net(pl.LightningModule):
    """Layers of several pieces; one that no batch uses keeps its values, and what has no gradient has none."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)).double()
        self.unused = nn.Linear(6, 6).double()
        self.optimizer, self.seen = optimizer, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(x, y)

    def configure_optimizers(self) -> Any:
        made = OPTIMIZERS[self.optimizer](self.parameters())
        return [made], [{"scheduler": torch.optim.lr_scheduler.StepLR(made, 2, 0.5), "interval": "step"}]


class Skips(Net):
    """One batch has no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class Reads(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for layer in self.layers:
            if layer.weight.grad is not None:
                layer.weight.grad.mul_(2.0)


class StepsByHand(Net):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        self.seen.append(float(self.layers[0].weight.grad.sum()))


class Watched(Net):
    """A hook of the optimizer sees parameters that have all stepped."""

    def configure_optimizers(self) -> Any:
        made = torch.optim.SGD(self.parameters(), lr=0.1)
        made.register_step_post_hook(lambda *_: self.seen.append(float(sum(p.sum() for p in self.layers.parameters()))))
        return made


class ReadsBehind(Net):
    """Gradients are still there after the step."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(sum(float(layer.weight.grad.square().sum()) for layer in self.layers))


KINDS = {kind.__name__: kind for kind in (Net, Skips, Reads, StepsByHand, Watched, ReadsBehind)}


@contextmanager
def small_pieces(parts: list[int]) -> Iterator[None]:
    """Sum in pieces of one layer; note after every batch how many parts stepped later than the first."""
    usual = Runner.land

    def land(self: Runner, step: Any, **options: Any) -> None:
        calls = list[None]()
        usual(self, lambda: (step(), calls.append(None)), **options)
        parts.append(len(calls))

    options = Gradients.__init__.__kwdefaults__
    with mock.patch.dict(options, piece_bytes=400), mock.patch.object(Runner, "land", land):
        yield


def fitted(kind: str, optimizer: str, options: dict[str, Any] | None, trainer: dict[str, Any]) -> Any:
    """Return parameters, what hooks saw, and the parts of every step; a worker function."""
    module, parts = KINDS[kind](optimizer), list[int]()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4 * STEPS, 6, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(6, (len(x),), generator=generator))
    strategy = "auto" if options is None else dapple(**options)
    with small_pieces(parts):
        made = make_trainer(strategy, max_epochs=1, **trainer)
        made.fit(module, DataLoader(data, 4))
    return {k: p.detach().clone() for k, p in module.named_parameters()}, module.seen, parts


def check(kind: str, optimizer: str, options: dict[str, Any], trainer: dict[str, Any]) -> list[list[int]]:
    parameters, seen, _ = fitted(kind, optimizer, None, trainer)
    found = World(sum(map(int, options["layout"].split("-")))).run(fitted, kind, optimizer, options, trainer)
    for one in found:
        torch.testing.assert_close(one[0], parameters, rtol=1e-9, atol=1e-9)
        assert one[1] == pytest.approx(seen, rel=1e-9)
    return [one[2] for one in found]


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{"layout": "2"}, {"layout": "2-1", "microbatches": 2}], ids=lambda o: o["layout"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_step_beside_the_sums_of_others(optimizer: str, options: dict[str, Any]) -> None:
    first, *_ = check("Net", optimizer, options, {})
    assert first == [first[0]] * STEPS
    assert first[0] == 3 if options["layout"] == "2" else first[0] >= 1


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["Skips", "ReadsBehind"])
@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_what_is_read_after_the_step_is_there(kind: str, capture: str) -> None:
    check(kind, "adamw", {"layout": "2", "microbatches": 2, "capture": capture}, {})


@pytest.mark.parametrize(
    ("kind", "trainer"),
    [("Reads", {}), ("StepsByHand", {}), ("Watched", {}), ("Net", {"gradient_clip_val": 0.1})],
    ids=["hook", "own step", "hook of the optimizer", "clipped"],
)
def test_where_somebody_needs_all_gradients_they_are_waited_for(kind: str, trainer: dict[str, Any]) -> None:
    for parts in check(kind, "momentum", {"layout": "2"}, trainer):
        assert not any(parts)
