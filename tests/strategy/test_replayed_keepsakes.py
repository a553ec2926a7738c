"""What a replayed step keeps on its module: results of metrics, classes that it makes, and what nobody can be told."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import Raised, World
from strategy.fits import Losses, dapple, make_trainer

SAMPLES, WIDTH = 8, 4


class Net(pl.LightningModule):
    """Appends what a metric returned to a list, and makes a class that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.error = torchmetrics.MeanSquaredError()
        self.outputs: list[dict[str, Any]] = []
        self.double()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if not hasattr(self, "kind"):

            class Output:
                scale = 2.0

            self.kind = Output
        out = self.two(torch.tanh(self.one(batch))).squeeze(1) * self.kind.scale
        error = self.error(out.detach(), batch[:, 0].contiguous())
        self.outputs.append({"error": error, "samples": len(batch)})
        return (out - batch[:, 0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Untold(Net):
    """Keeps a function of its own, which the next step calls."""

    rate = staticmethod(lambda: 1.0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.two(self.one(batch)).square().mean() * self.rate()
        rate = self.rate() * 0.5
        self.rate = lambda: rate
        return loss


def fitted(kind: type[Net], options: dict[str, Any] | None) -> tuple[list[float], list[tuple[float, int]]]:
    """Return losses and what the step kept; a worker function."""
    torch.manual_seed(0)
    module, losses = kind(), Losses()
    data = torch.randn(4 * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=1, callbacks=[losses])
    trainer.fit(module, DataLoader(data, batch_size=SAMPLES))
    return losses.losses, [(float(one["error"]), one["samples"]) for one in module.outputs]


OPTIONS = {"layout": "1-1", "microbatches": 2, "capture": "replay", "planner": "uniform", "costs": "counted"}


def test_results_of_metrics_and_classes_are_kept_as_on_one_device() -> None:
    losses, kept = fitted(Net, None)
    for found, said in World(2).run(fitted, Net, OPTIONS):
        assert found == pytest.approx(losses, rel=1e-9)
        assert [n for _, n in said] == [n for _, n in kept]
        assert [error for error, _ in said] == pytest.approx([error for error, _ in kept], rel=1e-6)


def test_what_other_ranks_cannot_be_told_is_refused() -> None:
    for result in World(2).results(fitted, Untold, OPTIONS):
        assert isinstance(result, Raised)
        assert "self.rate" in result.text and "Keep numbers" in result.text
