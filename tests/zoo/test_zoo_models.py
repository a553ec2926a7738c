"""Every module of the zoo is a working LightningModule: a plain trainer changes its parameters."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from zoo import ZOO


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ZOO)
def test_a_plain_trainer_trains_it(name):
    pl.seed_everything(0, verbose=False)
    module = ZOO[name].make_module()
    batches = DataLoader([ZOO[name].make_batch(4) for _ in range(2)], batch_size=None)
    before = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    trainer = pl.Trainer(
        max_steps=4 if name == "manual_gan" else 2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches)
    assert trainer.global_step == trainer.max_steps
    same = [n for n, p in module.named_parameters() if n in before and torch.equal(p, before[n])]
    assert len(same) < len(before), "no parameter was trained"
    assert all(torch.isfinite(p).all() for p in module.parameters())
