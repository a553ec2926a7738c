"""Fits of a module on ranks that exist already: to be called on each of them (`benchmarks.ranks`)."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import Strategy

from benchmarks.models import ALL, loader
from lightning_pipe import DappleStrategy


class SharedGpu(CUDAAccelerator):
    """One GPU for all ranks of a host: gloo does not mind, NCCL would."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0] * int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", device) for device in devices]


def fit(
    model: str, strategy: DappleStrategy, *, batch_size: int, steps: int, callback: pl.Callback | None = None
) -> None:
    """Fit a model of `benchmarks.models` for some steps, quietly; on all ranks of the process group together."""
    torch.manual_seed(0)
    data = loader(ALL[model], batch_size=batch_size, batches=steps)
    torch.manual_seed(0)
    fit_module(ALL[model].make(), data, strategy, callback=callback)


def fit_module(
    module: pl.LightningModule,
    data: Iterable[Any],
    strategy: Strategy | str,
    *,
    callback: pl.Callback | None = None,
    hosts: int = 1,
    **options: Any,
) -> None:
    """Fit a module for an epoch, quietly; on all ranks of the process group together. Options are the trainer's."""
    rank, devices = dist.get_rank(), dist.get_world_size() // hosts
    local = {"LOCAL_RANK": rank % devices, "LOCAL_WORLD_SIZE": devices, "GROUP_RANK": rank // devices}
    everywhere = {"RANK": rank, "WORLD_SIZE": dist.get_world_size()}
    os.environ.update({name: str(value) for name, value in (local | everywhere).items()})
    for name in ("lightning.pytorch", "lightning_pipe"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    trainer = pl.Trainer(
        devices=devices,
        num_nodes=hosts,
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        max_epochs=1,
        callbacks=callback,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"accelerator": "cpu", "logger": False, **options},
    )
    trainer.fit(module, data)
