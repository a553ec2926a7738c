"""A module of two layers, and everything that one device and ranks of a test world must have in common after a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer

LAYOUTS = [
    {"layout": "1-1", "microbatches": 2},
    {"layout": "1-1", "microbatches": 2, "capture": "replay"},
    {"layout": "2-1", "microbatches": 2},
]


def samples(count: int = 20, seed: int = 1) -> TensorDataset:
    """Return inputs of 4 numbers, and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(3, (count,), generator=generator))


def loader(count: int = 20, size: int = 4, seed: int = 1) -> DataLoader[Any]:
    """Return batches of samples."""
    return DataLoader(samples(count, seed), size)


class Named(Dataset[Any]):
    """Samples with names, and bytes where these are wanted."""

    def __init__(self, count: int = 20, *, raw: bool = False) -> None:
        (self.x, self.y), self.raw = samples(count).tensors, raw

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        own = {"raw": bytes([index])} if self.raw else {}
        return {"x": self.x[index], "y": self.y[index], "name": f"{index}.png", **own}


class Small(pl.LightningModule):
    """Layers for two stages.

    Attributes:
        data: returns what is given to the trainer for training; None where the module has loaders of its own.
        validation: the same for validation.
        noted: what hooks have found.
    """

    data: Any = staticmethod(loader)
    validation: Any = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()
        self.noted: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(
    kind: Callable[[], Small], options: dict[str, Any] | None, *, function: str = "fit", **trainers: Any
) -> tuple[Any, ...]:
    """Fit or validate, and return losses, what was noted, logged values and parameters; for worker functions.

    Args:
        kind: makes the module, after the seed.
        options: of the strategy; None for one device.
        function: of the trainer.
        trainers: options of the trainer.
    """
    pl.seed_everything(3, verbose=False)
    module, losses = kind(), Losses()
    trainer = make_trainer(
        "auto" if options is None else dapple(**options), max_epochs=2, callbacks=[losses], **trainers
    )
    given = [made() for made in (module.data, module.validation) if made is not None]
    if given and isinstance(given[0], pl.LightningDataModule):
        getattr(trainer, function)(module, datamodule=given[0])
    else:
        getattr(trainer, function)(module, *given)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    return losses.losses, module.noted, metrics, parameters


def assert_alike(found: Any, expected: Any) -> None:
    """Compare trees of numbers, tensors and anything else."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        found, expected = [*found.values()], [*expected.values()]
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, two in zip(found, expected, strict=True):
            assert_alike(one, two)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    else:
        assert found == (pytest.approx(expected, rel=1e-9) if isinstance(expected, float) else expected)


def assert_as_on_one_device(function: Callable[..., tuple[Any, ...]], name: str, options: dict[str, Any]) -> None:
    """Compare what a worker function that calls `run` returns on every rank with that of one device."""
    losses, noted, metrics, parameters = function(name, None)
    layout = options.get("layout", "1-1")
    for found in World(sum(map(int, layout.split("-")))).run(function, name, options):
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert_alike(found[1], noted)
        assert found[2] == pytest.approx(metrics, rel=1e-6)
        torch.testing.assert_close(found[3], parameters, rtol=1e-9, atol=1e-9)
