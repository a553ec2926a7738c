"""Train with LightningCLI, where the strategy is one more argument.

    python examples/07_lightning_cli.py fit --trainer.strategy dapple --trainer.devices 2 --trainer.max_epochs 1

Needs `pip install 'lightning[pytorch-extra]'` (jsonargparse). For real size: keep the arguments in a YAML file and give
it with `--config`; options of the strategy go under `trainer.strategy.init_args` of `lightning_pipe.DappleStrategy`.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_pipe  # noqa: F401  # makes strategy="dapple" known


class Regression(pl.LightningModule):
    def __init__(self, width: int = 64, depth: int = 4, lr: float = 1e-3):
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


class Squares(pl.LightningDataModule):
    def __init__(self, width: int = 64, batch_size: int = 32):
        super().__init__()
        self.width, self.batch_size = width, batch_size

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(1024, self.width, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.square().mean(1, keepdim=True)), batch_size=self.batch_size)


if __name__ == "__main__":
    cli = LightningCLI(Regression, Squares, save_config_callback=None, seed_everything_default=0)
    if cli.trainer.is_global_zero:
        print(f"trained {cli.trainer.global_step} steps, loss {cli.trainer.callback_metrics['loss']:.3f}")
