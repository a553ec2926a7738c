"""What a step costs beside its computes grows no faster than the model."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from ranks.world import World
from strategy.fits import dapple, make_trainer
from strategy.small import loader

FIRST, LAST = 4, 6  # steps in which calls are counted
DEPTHS = (4, 8, 16)


class Calls(pl.Callback):
    """Counts calls of functions, Python's and others."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            sys.setprofile(self._count)
        elif batch_idx == LAST:
            sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event in ("call", "c_call")


class Deep(pl.LightningModule):
    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [layer for _ in range(depth) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())]
        self.layers = nn.Sequential(*layers).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def calls(depth: int, options: dict[str, Any]) -> int:
    """Return the number of calls of this rank in some steps; a worker function."""
    counter = Calls()
    make_trainer(dapple(**options), max_epochs=1, callbacks=[counter]).fit(Deep(depth), loader(40))
    return counter.calls


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "1-1", "microbatches": 2},
        {"layout": "1-1", "microbatches": 2, "capture": "replay"},
        {"layout": "2", "microbatches": 2},
    ],
    ids=["pipeline", "replay", "replicas"],
)
def test_calls_per_step_grow_no_faster_than_the_model(options: dict[str, Any]) -> None:
    """Every parameter was looked for among buffers, for which the whole module was walked: 10 ms of a GPT's step."""
    few, some, many = (World(2).run(calls, depth, options) for depth in DEPTHS)
    for rank in range(2):
        per_layer = [(some[rank] - few[rank]) / (8 - 4), (many[rank] - some[rank]) / (16 - 8)]
        assert 0 < per_layer[1] < 1.25 * per_layer[0]


@pytest.mark.parametrize(
    ("options", "most"),
    [({"layout": "1-1", "microbatches": 2}, 400), ({"layout": "2", "microbatches": 2}, 500)],
    ids=["pipeline", "replicas"],
)
def test_what_holds_for_a_whole_fit_is_not_asked_per_parameter_of_every_step(
    options: dict[str, Any], most: int
) -> None:
    """A layer of four parameters and three buffers made 680 to 1,100 calls: is it here, has it hooks, was it replaced.

    What its operators, the optimizer and the sums of its gradients take is left.
    """
    few, many = (World(2).run(calls, depth, options) for depth in (8, 16))
    for rank in range(2):
        assert (many[rank] - few[rank]) / (16 - 8) / (LAST - FIRST) < most
