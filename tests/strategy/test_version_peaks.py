"""Law of the memory of fits that are never flushed: the measured peak of every rank is within 3 % of its price."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.config import WeightVersions
from lightning_pipe.runtime.memory import PeakMemory
from ranks.world import World
from slow import slow_but
from strategy.fits import dapple, make_trainer

WIDTH, ROWS, BATCHES = 384, 64, 8
FIRST, LAST = 3, BATCHES - 2  # batches of the rounds that are measured; behind the last, nothing is in flight


class Wide(pl.LightningModule):
    """Layers whose batches are small, as these are no part of a prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH if i else 1, WIDTH) for i in range(6))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (value,) = batch
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Watches(pl.Callback):
    """Measure some rounds, from an empty pipeline on: a checkpoint gives up what is in flight."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.peak = folder, PeakMemory(torch.device("cpu"))
        self.wanted: tuple[int, ...] = ()
        self.there: list[int] = []  # before: parameters, optimizer state and copies that are used again

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == FIRST:
            self.peak.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == FIRST - 1:
            trainer.save_checkpoint(self.folder / "empty.ckpt")
        if batch_idx == LAST:
            self.peak.__exit__(None, None, None)
            if (proposal := trainer.strategy._session._pipeline.proposal) is not None:
                self.wanted = proposal.judged[0].peak_bytes
                states = [proposal.judged[0].prices.state_parts(rank) for rank in range(2)]
                self.there = [state.parameters + state.optimizer + state.versions for state in states]


def fit(versions: str, folder: Path) -> tuple[int | None, tuple[int, ...], list[int]]:
    """Fit, and return what was measured; on rank 0 what was foreseen, too; a worker function."""
    watch, module = Watches(folder), Wide()
    strategy = dapple(layout="1-1", microbatches=2, versions=versions, cache="off", planner="uniform")
    loader = DataLoader(TensorDataset(torch.randn(ROWS * BATCHES, 1)), batch_size=ROWS)
    make_trainer(strategy, callbacks=[watch], max_epochs=1).fit(module, loader)
    return watch.peak.bytes, watch.wanted, watch.there


@pytest.mark.parametrize(
    "versions", slow_but(("2bw", "pipemare"), [name for name in get_args(WeightVersions) if name != "sync"])
)
def test_the_peak_is_as_foreseen(versions: str, tmp_path: Path) -> None:
    (risen, wanted, there), (other, _, _) = World(2).run(fit, versions, tmp_path)
    measured = [risen + there[0], other + there[1]]
    assert measured == pytest.approx(wanted, rel=0.03)
