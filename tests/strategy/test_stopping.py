"""A loss that is no number at one step ends training where one device ends it."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import World
from strategy.fits import dapple, make_trainer


class Fails(pl.LightningModule):
    """Its loss is no number at step 5."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean()
        if self.global_step == 5:
            loss = loss * float("nan")
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def steps(options: dict[str, object] | None) -> int:
    """Return after how many steps training ends, of 6 epochs with 4 each."""
    torch.manual_seed(0)
    stops = EarlyStopping("loss", check_finite=True, patience=9, check_on_train_epoch_end=True)
    strategy = "auto" if options is None else dapple(**options)
    trainer = make_trainer(strategy, max_epochs=6, callbacks=[stops])
    trainer.fit(Fails(), DataLoader(torch.randn(16, 4), batch_size=4))
    return trainer.global_step


@pytest.mark.parametrize("capture", ["auto", "replay"])
@pytest.mark.parametrize("layout", ["1-1", "2"])
def test_training_ends_at_the_step_of_one_device(capture: str, layout: str) -> None:
    assert World(2).run(steps, {"layout": layout, "capture": capture, "microbatches": 2}) == [steps(None)] * 2 == [8, 8]
