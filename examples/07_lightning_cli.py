"""Train with LightningCLI, where the strategy is one more argument.

  python examples/07_lightning_cli.py fit --trainer.strategy lightning_pipe.DappleStrategy --trainer.strategy.layout 1-1

Two stages; `--trainer.strategy dapple` leaves the choice to the planner. Afterwards the same command runs on one
device, to compare the loss. Needs `pip install 'lightning[pytorch-extra]'` (jsonargparse). For real size: keep the
arguments in a YAML file and give it with `--config`; options of the strategy go under `trainer.strategy.init_args`.
"""

import sys

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_pipe  # noqa: F401  # makes strategy="dapple" known


class Regression(pl.LightningModule):
    def __init__(self, width: int = 64, depth: int = 4, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Sums(pl.LightningDataModule):
    def __init__(self, width: int = 64, batch_size: int = 32):
        super().__init__()
        self.width, self.batch_size = width, batch_size

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(2048, self.width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return DataLoader(TensorDataset(x, torch.tanh(x[:, :8].sum(1, keepdim=True))), batch_size=self.batch_size)


def train(*options: str) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
        "precision": "64-true",  # so that losses can be compared to the last digits
    }  # fmt: skip
    cli = LightningCLI(
        Regression, Sums, trainer_defaults=defaults, save_config_callback=None, seed_everything_default=0,
        args=[*sys.argv[1:], *options],
    )  # fmt: skip
    return cli.trainer


if __name__ == "__main__":
    pipeline = train()
    if pipeline.is_global_zero:
        print(f"trained {pipeline.global_step} steps; now the same on one device")
        one_device = train("--trainer.strategy", "auto", "--trainer.devices", "1")
        losses = [float(trainer.callback_metrics["loss"]) for trainer in (one_device, pipeline)]
        print("one device: {:.7f}, pipeline: {:.7f}".format(*losses))
        if abs(losses[0] - losses[1]) > 1e-6:
            raise SystemExit("The losses differ.")
