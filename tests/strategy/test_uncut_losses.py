"""A loss that micro-batches cannot make is made of all samples, wherever the step is replayed."""

from __future__ import annotations

import logging
import logging.handlers
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ranks.world import World
from strategy.fits import Losses, checked, make_trainer

SLOW = """
hosts:
- name: a
  devices: [{kind: slow, count: 2, memory: 1 GiB, rates: {memory: 1 MB/s, tflops: {float64: 0.001}}}]
  inside: {latency: 1 us, bandwidth: 10 GB/s}
"""  # computes so slowly that a planner cuts batches


class Selects(pl.LightningModule):
    """The mean over samples that a mask selects, of which micro-batches have unequal numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
        ).double()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        kept = x[:, 0] > 0
        return F.cross_entropy(self.layers(x)[kept], y[kept])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LogsSelected(Selects):
    """A mean over what the mask selects is logged; the loss is that of all samples."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.layers(x)
        self.log("selected", logits[x[:, 0] > 0].mean(), reduce_fx="sum")
        return F.cross_entropy(logits, y)


def trained(
    options: dict[str, Any] | None, alike: bool = False, kind: type[Selects] = Selects
) -> tuple[list[float], list[str]]:
    """Return the losses of a fit, and what it said; `alike`: every second sample of the first batch is selected."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(24, 8, generator=draw, dtype=torch.float64)
    if alike:
        x[:8, 0] = torch.tensor([1.0, -1.0] * 4)
    data = TensorDataset(x, torch.randint(4, (24,), generator=draw))
    losses = Losses()
    trainer = make_trainer("auto" if options is None else checked(**options), max_epochs=2, callbacks=[losses])
    logged = logging.handlers.BufferingHandler(1000)
    log = logging.getLogger("lightning_pipe.strategy.pipeline")
    log.addHandler(logged)
    log.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(kind(), DataLoader(data, batch_size=8))
    finally:
        log.removeHandler(logged)
    return losses.losses, [*(str(one.message) for one in caught), *(one.getMessage() for one in logged.buffer)]


@pytest.mark.parametrize(
    ("layout", "alike", "asked"), [("1-1", False, True), ("1-1", True, False), ("2", True, False), ("2", False, True)]
)
def test_a_mean_over_selected_samples_is_that_of_the_batch(
    layout: str, alike: bool, asked: bool, tmp_path: Path
) -> None:
    """Micro-batches divide by what they select: the batch was weighed wrongly, or stayed whole, or was refused."""
    path = tmp_path / "cluster.yaml"
    path.write_text(SLOW)
    expected, _ = trained(None, alike)
    cuts = {"microbatches": 2, "schedule": "gpipe"} if asked else {"cluster": str(path), "planner": "auto"}
    for losses, told in World(2).run(trained, {"layout": layout, **cuts}, alike):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert not [text for text in told if "whole batches" in text or "weigh by their samples" in text], told


def test_what_has_no_part_in_the_loss_does_not_keep_batches_whole(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(SLOW)
    expected, _ = trained(None, kind=LogsSelected)
    by_planner = {"cluster": str(path), "planner": "auto"}
    for asked in (by_planner, {"microbatches": 2}, by_planner):  # the last finds the check of the first
        (losses, told), _ = World(2).run(trained, {"layout": "1-1", **asked}, False, LogsSelected)
        assert losses == pytest.approx(expected, rel=1e-9)
        assert not [text for text in told if "whole batches" in text or "weigh by their samples" in text], told
