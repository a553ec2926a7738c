"""A buffer that only later batches write to is what it is on one device after each of them, on every rank."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer

ROUNDING = 1e-9


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(4, 4).double() for _ in range(3))
        self.register_buffer("kept", torch.zeros(4, dtype=torch.float64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ReadBehind(Net):
    """The first stage writes it, and the last one reads it."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.one(batch)
        if batch_idx % 2:
            with torch.no_grad():
                self.kept.copy_(hidden.mean(0))
        return (self.three(torch.tanh(self.two(torch.tanh(hidden)))) - self.kept).square().mean()


class Counted(Net):
    """Nothing reads it."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx % 2:
            self.kept += 1
        return self.three(torch.tanh(self.two(torch.tanh(self.one(batch))))).square().mean()


def fit(kind: type[Net], options: dict[str, Any] | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    module, seen = kind(), Losses()
    data = torch.randn(20, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    strategy = "auto" if options is None else dapple(**options)
    make_trainer(strategy, max_epochs=2, callbacks=[seen]).fit(module, DataLoader(data, batch_size=4))
    return seen.losses, {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("kind", [ReadBehind, Counted])
def test_every_rank_has_what_a_later_graph_has_written(kind: type[Net]) -> None:
    """Ranks of other stages went on with the value that they had, and ended with it."""
    expected = fit(kind, None)
    for found in World(2).run(fit, kind, {"layout": "1-1", "microbatches": 1}):
        torch.testing.assert_close(found, expected, rtol=ROUNDING, atol=ROUNDING)
