"""Code of data modules, loaders and data sets that takes every n-th sample by rank takes all of them in a pipeline."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.distributed import get_rank, get_world_size
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_pipe import DappleStrategy
from lightning_pipe.lightning_names import rank_zero_only
from lightning_pipe.strategy.loading.world_size import WholeData
from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer

SAMPLES, WIDTH = 16, 4


def samples() -> torch.Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def share(data: torch.Tensor) -> torch.Tensor:
    return data[get_rank() :: get_world_size()] if dist.is_initialized() else data


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.double()
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.two(torch.tanh(self.one(batch))).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if dist.is_initialized():  # hooks are told the truth
            self.seen.append((dist.get_rank(), dist.get_world_size()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hook(pl.LightningDataModule):
    """Divides in the hook that makes the loader."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(share(samples()), batch_size=4)


class Stream(IterableDataset):
    """Divides while it is iterated."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from share(samples())


class Streaming(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Stream(), batch_size=4)


class Part(Dataset):
    """Divides with every sample."""

    def __len__(self) -> int:
        return len(share(samples()))

    def __getitem__(self, index: int) -> torch.Tensor:
        return share(samples())[index]


class Parts(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Part(), batch_size=4)


class Launched(IterableDataset):
    """Divides by what a launcher has told this process, where one has."""

    def __init__(self, rank: str, ranks: str) -> None:
        self.names = rank, ranks

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank, ranks = (int(os.environ.get(name, default)) for name, default in zip(self.names, "01", strict=True))
        yield from samples()[rank::ranks]


NAMES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "on a host": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "SLURM": ("SLURM_PROCID", "SLURM_NTASKS"),
    "MPI": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}


class ByLauncher(pl.LightningDataModule):
    def __init__(self, launcher: str) -> None:
        super().__init__()
        self.launcher = launcher

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Launched(*NAMES[self.launcher]), batch_size=4)


DATA = {"hook": Hook, "stream": Streaming, "part": Parts, **{name: partial(ByLauncher, name) for name in NAMES}}


def fitted(name: str, options: dict[str, Any] | None) -> tuple[list[float], list[tuple[int, int]], list[str]]:
    """Fit, and return losses, ranks that hooks were told, and warnings about it; a worker function."""
    torch.manual_seed(0)
    module, losses = Net(), Losses()
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=2, callbacks=[losses])
    told = {}
    if dist.is_initialized() and name in NAMES:
        told = dict(zip(NAMES[name], map(str, (dist.get_rank(), dist.get_world_size())), strict=True))
    with warnings.catch_warnings(record=True) as said, pytest.MonkeyPatch.context() as patch:
        for variable, value in told.items():
            patch.setenv(variable, value)
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=DATA[name]())
        assert {variable: os.environ[variable] for variable in told} == told
    return (
        losses.losses,
        module.seen,
        [str(w.message) for w in said if "told that there is one process" in str(w.message)],
    )


@pytest.mark.parametrize("name", DATA)
def test_data_that_is_divided_by_rank_is_whole(name: str) -> None:
    expected, _, _ = fitted(name, None)
    assert len(expected) == 2 * SAMPLES // 4
    options = {"layout": "1-1", "microbatches": 2, "planner": "uniform", "costs": "counted"}
    for rank, (losses, seen, said) in enumerate(World(2).run(fitted, name, options)):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert set(seen) == {(rank, 2)}
        assert not said or "test_whole_data.py" in said[0]
        assert bool(said) == (rank == 0 and name not in NAMES)


def test_a_rank_knows_its_device_while_loaders_are_told_that_it_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # which `set_world_ranks` sets
    devices = [torch.device("cuda", index) for index in range(2)]
    strategy = DappleStrategy(parallel_devices=devices, cluster_environment=LightningEnvironment())
    strategy.set_world_ranks()
    with WholeData(ranks=2).while_loading():
        assert strategy.root_device == devices[1]
