"""finetuning-scheduler: its callback thaws a model in phases; then the best checkpoint is reloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from finetuning_scheduler import FinetuningScheduler, FTSCheckpoint
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn

from third_party.data import tensors
from third_party.entry import Way


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def run(way: Way) -> dict[str, Any]:
    seed_everything(0)
    schedule = {
        0: {"params": ["head.weight", "head.bias"], "max_transition_epoch": 1},
        1: {"params": ["body.2.weight", "body.2.bias"], "max_transition_epoch": 2},
        2: {"params": ["body.0.weight", "body.0.bias"], "max_transition_epoch": 3},
    }  # fmt: skip
    callbacks = [
        FinetuningScheduler(ft_schedule=schedule, epoch_transitions_only=True, allow_untested=True),
        FTSCheckpoint(monitor="val_loss"),
    ]
    trainer = Trainer(
        callbacks=callbacks, max_epochs=4, precision="64-true", default_root_dir=way.folder, **way.trainer
    )
    trainer.fit(Net(), tensors((40, 8), (40, 1)), tensors((16, 8), (16, 1)))
    return {}


def reload(folder: Path) -> dict[str, Any]:
    checkpoint = next((folder / "lightning_logs" / "version_0" / "checkpoints").glob("*.ckpt"))
    model = Net.load_from_checkpoint(checkpoint, weights_only=False)
    return {"weights": model.state_dict()}
