"""The module, data and runs of which the table of compatibility asks whether a pipeline equals one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

SAMPLES, FEATURES, CLASSES = 24, 4, 3


def tensors(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=random, dtype=torch.float64)
    return x, torch.randint(CLASSES, (samples,), generator=random)


def loader(batch_size: int = 8, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*tensors()), batch_size, **options)


class Net(pl.LightningModule):
    """A module that uses what most projects use, in float64."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.ones(2, FEATURES, dtype=torch.float64)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.backbone = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width)).double()
            self.head = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.backbone(x)))

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch[0].to(self.head[0].weight.dtype)), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Data(pl.LightningDataModule):
    """Data with the hooks that data modules have."""

    def setup(self, stage: str) -> None:
        self.data = TensorDataset(*tensors())

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, 8)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, 8)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]


class Stream(IterableDataset):
    """Samples without a length."""

    def __iter__(self) -> Any:
        return iter(zip(*tensors(21), strict=True))


class Named(Dataset):
    """Samples as dictionaries."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, y = tensors()
        return {"x": x[index], "y": y[index], "name": str(index)}


def fit(trainer: pl.Trainer, module: pl.LightningModule, folder: str, data: Any = None, **options: Any) -> Any:
    """Fit, and return nothing else to compare."""
    if isinstance(data, pl.LightningDataModule):
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, loader() if data is None else data, options.get("validation", loader()))


def state_of(trainer: pl.Trainer, module: pl.LightningModule, extra: Any) -> dict[str, Any]:
    """Return what a run leaves: weights, buffers, metrics, steps, and what it returned."""
    return {
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "metrics": {name: torch.as_tensor(value).double() for name, value in trainer.callback_metrics.items()},
        "steps": torch.tensor([trainer.global_step, trainer.current_epoch]),
        "extra": extra,
    }
