"""Recipes for data parallelism train on all data, or are told what to leave out."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import EarlyStopping, ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler

from lightning_pipe.errors import UnsupportedError
from lightning_pipe.strategy.loading.samplers import gather_shards
from ranks.world import World
from strategy.fits import Losses, dapple, drawn_on_host, make_trainer

SAMPLES = 13


def rows() -> list[torch.Tensor]:
    return list(torch.arange(SAMPLES * 3.0, dtype=torch.float64).reshape(SAMPLES, 3).div(10).sin())


class Halves(DistributedSampler):
    """A sampler of the user's own, after torch's."""

    def __iter__(self) -> Any:
        return iter([int(index) for index in reversed(list(super().__iter__()))])


def loader(kind: str, ranks: int, rank: int) -> DataLoader:
    """Make a loader as code for several devices does."""
    data, own = rows(), {"num_replicas": ranks, "rank": rank}
    match kind:
        case "shuffled":
            return DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=True, seed=3, **own))
        case "cut off":
            return DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False, drop_last=True, **own))
        case "inside":
            inner = DistributedSampler(data, shuffle=True, seed=5, **own)
            return DataLoader(data, batch_sampler=BatchSampler(inner, 4, drop_last=False))
        case "unrepeated":
            return DataLoader(data, 4, sampler=UnrepeatedDistributedSampler(data, shuffle=True, **own))
        case "wrapped":
            return DataLoader(data, 4, sampler=DistributedSamplerWrapper(SequentialSampler(data), **own))
        case _:
            return DataLoader(data, 4, sampler=Halves(data, seed=2, **own))


class Recipe(pl.LightningModule):
    """The loader and the rate are made for the number of ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.kind = kind

    def train_dataloader(self) -> DataLoader:
        return loader(self.kind, self.trainer.world_size, self.trainer.global_rank)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_recipe(kind: str, options: dict[str, Any] | None) -> tuple[list[float], list[str]]:
    losses = Losses()
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=3, callbacks=[losses])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Recipe(kind))
    return losses.losses, [str(warning.message) for warning in caught]


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["1-1", "2"])
@pytest.mark.parametrize("kind", ["shuffled", "cut off", "inside", "unrepeated", "wrapped", "own"])
def test_a_sampler_for_several_ranks_draws_all_samples(kind: str, layout: str) -> None:
    expected, silent = fit_recipe(kind, None)
    assert not [text for text in silent if "num_replicas" in text or "world_size" in text]
    results = World(2).run(fit_recipe, kind, {"layout": layout, "microbatches": 2})
    for losses, _ in results:
        assert losses == pytest.approx(expected, rel=1e-12)
    said = results[0][1]
    assert len([text for text in said if "num_replicas=2" in text and "13 samples" in text]) == 1
    (line,) = [text for text in said if "world_size" in text]
    assert "test_data_parallel_recipes.py:" in line and "in train_dataloader reads world_size = 2" in line


class Synchronised(Recipe):
    """A layer that would talk to other ranks, and a choice by whether there are some."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.net.insert(1, nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(8).double()))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(rows(), 4, drop_last=True)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (2 if torch.distributed.is_initialized() else 1)


def fit_synchronised(options: dict[str, Any] | None) -> list[float]:
    losses = Losses()
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=2, callbacks=[losses])
    trainer.fit(Synchronised(""))
    return losses.losses


@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_a_step_finds_no_process_group(capture: str) -> None:
    """SyncBatchNorm asked for tensors on a GPU."""
    expected = fit_synchronised(None)
    for losses in World(2).run(fit_synchronised, {"layout": "1-1", "microbatches": 1, "capture": capture}):
        assert losses == pytest.approx(expected, rel=1e-12)


class LogsOnFirstRank(Recipe):
    """Values that rank 0 alone logs at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__("")
        self.losses: list[torch.Tensor] = []

    def train_dataloader(self) -> DataLoader:
        return DataLoader(rows(), 4)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(rows(), 6)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.losses.append(super().training_step(batch, batch_idx))

    def on_validation_epoch_end(self) -> None:
        value = torch.stack(self.losses).mean()
        self.losses.clear()
        if self.trainer.is_global_zero:
            self.log("validation", value, rank_zero_only=True)

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("rising", float(self.current_epoch), rank_zero_only=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "validation"}}


def fit_that_logs_on_first_rank(stops_by: str, options: dict[str, Any] | None) -> list[float]:
    losses = Losses()
    stopping = EarlyStopping(stops_by, mode="max" if stops_by == "validation" else "min", patience=2)
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=8, callbacks=[losses, stopping])
    trainer.fit(LogsOnFirstRank())
    return losses.losses


@pytest.mark.parametrize("stops_by", ["validation", "rising"])
def test_what_rank_0_logs_at_the_end_of_an_epoch_is_monitored_on_every_rank(stops_by: str) -> None:
    expected = fit_that_logs_on_first_rank(stops_by, None)
    assert len(expected) == 3 * 4
    for losses in World(2).run(fit_that_logs_on_first_rank, stops_by, {"layout": "1-1", "microbatches": 2}):
        assert losses == pytest.approx(expected, rel=1e-12)


class Blocks(Sampler):
    """Divide the data in a way of its own."""

    def __init__(self, data: Any, num_replicas: int, rank: int) -> None:
        self.dataset, self.num_replicas, self.rank = data, num_replicas, rank

    def __iter__(self) -> Any:
        return iter(range(self.rank * len(self), (self.rank + 1) * len(self)))

    def __len__(self) -> int:
        return len(self.dataset) // self.num_replicas


class Fixed(DistributedSampler):
    """A sampler whose number of replicas cannot be set."""

    num_replicas = property(lambda self: 2, lambda self, value: self.check(value))

    def check(self, value: int) -> None:
        if value != 2:
            raise AttributeError("num_replicas is 2")


@pytest.mark.parametrize("kind", [Blocks, Fixed])
def test_a_sampler_that_divides_in_its_own_way_is_refused(kind: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"{kind.__name__} divides .* num_replicas=1"):
        gather_shards(DataLoader(rows(), 4, sampler=kind(rows(), num_replicas=2, rank=0)))


def monitor(options: dict[str, Any] | None, folder: str) -> list[str]:
    logger, callback = CSVLogger(folder, version=""), ThroughputMonitor(len, window_size=2)
    callback.available_flops = None
    trainer = make_trainer(
        "auto" if options is None else dapple(**options),
        max_epochs=1,
        callbacks=[callback],
        logger=logger,
        log_every_n_steps=1,
    )
    module = Recipe("cut off")
    trainer.fit(module, DataLoader(rows(), 4))
    return sorted(logger.experiment.metrics_keys) if trainer.is_global_zero else []


def test_throughput_is_that_of_the_batch(tmp_path: Any) -> None:
    expected = monitor(None, str(tmp_path / "one"))
    first, _ = World(2).run(monitor, {"layout": "1-1", "microbatches": 2}, str(tmp_path / "two"))
    assert first == expected and any("samples_per_sec" in key for key in first)


@drawn_on_host
def test_an_empty_module_is_initialised_all_the_same() -> None:
    trainer = make_trainer(dapple())
    torch.manual_seed(1)
    with trainer.init_module(empty_init=True):
        found = nn.Linear(4, 4)
    torch.manual_seed(1)
    torch.testing.assert_close(found.state_dict(), nn.Linear(4, 4).state_dict(), rtol=0, atol=0)
