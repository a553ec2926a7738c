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
