"""The modules of the parity tests are what those tests need: repeatable, trained, and with an uneven last batch."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from models.parity import PARITY, make_loader, make_module


def trained(name: str):
    module = make_module(name, dtype=torch.float64)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, make_loader(name, dtype=torch.float64), make_loader(name, seed=1, dtype=torch.float64))
    return module, trainer.callback_metrics


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PARITY)
def test_one_device_trains_it_the_same_way_twice(name):
    (one, metrics), (two, again) = trained(name), trained(name)
    before = dict(make_module(name, dtype=torch.float64).named_parameters())
    assert {"train_loss_step", "train_loss_epoch", "train_acc_epoch", "val_loss", "val_acc"} <= set(metrics)
    assert metrics == again
    for (parameter, value), other in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(value, other), parameter
        assert torch.equal(value, before[parameter]) != value.requires_grad, parameter


@pytest.mark.parametrize("name", PARITY)
def test_the_last_batch_is_smaller(name):
    sizes = [len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0]) for batch in make_loader(name)]
    assert sizes == [8, 8, 6]
