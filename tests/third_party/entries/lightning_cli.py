"""LightningCLI: `fit` and `predict` with a file of options, in which the strategy is a class with its arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from third_party.entry import Way


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        random = torch.Generator().manual_seed(1)
        inputs = torch.randn(56, 8, generator=random)
        self.data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=self.batch_size)

    predict_dataloader = val_dataloader


class Net(LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def run(way: Way) -> dict[str, Any]:
    strategies = {
        "one": "auto", "default": "dapple",
        "split": {"class_path": "lightning_pipe.DappleStrategy", "init_args": {"layout": "1-1"}},
    }  # fmt: skip
    way.strategy_name  # noqa: B018 - the name is registered by an import
    options = {
        "seed_everything": 0,
        "trainer": {
            "accelerator": "cpu", "devices": way.devices, "strategy": strategies[way.name], "precision": "64-true",
            "max_epochs": 2, "limit_train_batches": 5, "default_root_dir": str(way.folder),
        },
    }  # fmt: skip
    path = way.folder / "options.yaml"
    path.write_text(yaml.safe_dump(options))
    sys.argv[1:] = ["fit", "--config", str(path)]
    cli = LightningCLI(Net, Data, save_config_kwargs={"overwrite": True})
    return {"predictions": cli.trainer.predict(cli.model, datamodule=cli.datamodule, ckpt_path="best")}


def reload(folder: Path) -> dict[str, Any]:
    checkpoint = next((folder / "lightning_logs" / "version_0" / "checkpoints").glob("*.ckpt"))
    sys.argv[1:] = ["predict", "--config", str(folder / "options.yaml"), "--ckpt_path", str(checkpoint)]
    sys.argv += ["--trainer.strategy", "auto", "--trainer.devices", "1", "--trainer.logger", "false"]
    cli = LightningCLI(Net, Data, save_config_callback=None)
    return {"weights": cli.model.state_dict()}
