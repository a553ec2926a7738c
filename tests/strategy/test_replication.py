"""A dear part that no cut divides gets two of three ranks, unasked, and the training stays that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer

ROUNDING = 1e-9  # float64: sums in another order, over a few steps
SAMPLES, STEPS = 12, 4
TOKENS, WIDTH, HIDDEN = 256, 128, 512

CLUSTER = """
hosts:
- name: a
  devices: [{kind: equal, count: 3, memory: 1 GiB}]
  inside: {latency: 10 us, bandwidth: 300 MB/s}
"""


class Unbalanced(pl.LightningModule):
    """One product over all tokens, which has most of the work; then most of the parameters, over their mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.double()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        tokens, wanted = batch
        return F.mse_loss(self.down(torch.tanh(self.up(self.wide(tokens).mean(1)))), wanted)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trained(strategy: Any) -> list[float]:
    """Return the losses of a fit."""
    torch.manual_seed(1)
    count = SAMPLES * STEPS
    options = {"dtype": torch.float64}
    data = TensorDataset(torch.randn(count, TOKENS, WIDTH, **options), torch.randn(count, HIDDEN, **options))
    losses = Losses()
    make_trainer(strategy, max_epochs=1, callbacks=[losses]).fit(Unbalanced(), DataLoader(data, SAMPLES))
    return losses.losses


def planned_and_trained(cluster: str) -> tuple[tuple[tuple[int, ...], ...] | None, list[float]]:
    """Fit with a plan that nobody shaped; return the ranks of its stages where they are known, and the losses."""
    strategy = dapple(planner="auto", cluster=cluster)
    losses = trained(strategy)
    return None if strategy.plan is None else tuple(stage.ranks for stage in strategy.plan.stages), losses


def test_a_dear_part_is_replicated_unasked_and_losses_stay_those_of_one_process(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    found = World(3).run(planned_and_trained, str(path))
    ranks = found[0][0]
    assert ranks is not None and [len(stage) for stage in ranks] == [2, 1], ranks
    expected = torch.tensor(trained("auto"), dtype=torch.float64)
    for rank, (_, losses) in enumerate(found):
        apart = (torch.tensor(losses, dtype=torch.float64) / expected - 1).abs().max().item()
        assert apart <= ROUNDING, (rank, losses, expected)


class Bank(pl.LightningModule):
    """An average over samples, a counter of batches, and entries and counts that samples write each for themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("entries", torch.zeros(8, 4))
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("batches", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        x, index = batch
        out = self.two(torch.tanh(self.one(x)))
        loss = (out - self.entries[index]).square().mean()
        self.entries[index] = out.detach()
        self.seen += F.one_hot(index, 8).sum(0)
        self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
        self.batches += 1
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def buffers_after(layout: str) -> dict[str, torch.Tensor]:
    """Train, and return the buffers; "" for one device. A worker function."""
    torch.manual_seed(0)
    module, data = Bank().double(), TensorDataset(torch.randn(8, 4, dtype=torch.float64), torch.arange(8))
    strategy = dapple(layout=layout, microbatches=1, capture="joint", schedule="gpipe") if layout else "auto"
    make_trainer(strategy, max_epochs=2).fit(module, DataLoader(data, batch_size=4))
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def test_buffers_that_samples_write_are_those_of_one_device_wherever_the_samples_are() -> None:
    """Replicas kept the mean of theirs: half of a memory bank's entry, half of a count."""
    expected = buffers_after("")
    for layout in ("2", "1-1"):
        for buffers in World(2).run(buffers_after, layout):
            torch.testing.assert_close(buffers, expected, rtol=ROUNDING, atol=ROUNDING)
