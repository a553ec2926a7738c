"""Fit the parity modules on one device and on ranks of a test world, and keep everything that must be equal.

With `LIGHTNING_PIPE_TESTS_ON=cuda` in the environment everything is fitted on the first GPU, which all ranks share.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment

from benchmarks.fits import SharedGpu
from lightning_pipe import DappleStrategy
from models.parity import make_loader, make_module

ON = os.environ.get("LIGHTNING_PIPE_TESTS_ON", "cpu")
QUIET = {
    "accelerator": ON,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class WorldEnvironment(ClusterEnvironment):
    """The processes of the test world exist already, and so does their process group."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "localhost"

    @property
    def main_port(self) -> int:
        return 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


def on_host(reason: str) -> pytest.MarkDecorator:
    """Leave a test out on a GPU, for this reason."""
    return pytest.mark.skipif(ON != "cpu", reason=reason)


drawn_on_host = on_host("Lightning draws initial values on the GPU of one device, ranks on their hosts")


@dataclass(frozen=True)
class Case:
    """A fit: what is trained, and how."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    epochs: int = 2
    batch_size: int = 8
    shuffle: bool = False
    dtype: torch.dtype = torch.float64
    dropout: float = 0.0


@dataclass
class Fitted:
    """What is left of a fit."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    metrics: dict[str, float]
    losses: list[float]


class Losses(pl.Callback):
    """Keep what every training batch returned, and the values of all logged metrics after it."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]) if outputs else -1.0)  # of a batch that was skipped


def dapple(**options: Any) -> DappleStrategy:
    """Return the strategy with counted costs (plans are the same in every run) and one rank per stage by default.

    Neither a witness nor the check before training runs unless asked for: they are half of what a short fit takes.
    """
    decided = {} if "plan" in options else {"planner": "uniform"}
    if not {"plan", "schedule", "planner"} & {*options}:
        decided |= {"warmup": "pa"}
    return DappleStrategy(**{"costs": "counted", "witness": False, "check": False, **decided, **options})


def checked(**options: Any) -> DappleStrategy:
    """Return such a strategy that checks the captured step, and what micro-batches make of it, before it trains."""
    return dapple(**{"check": True, **options})


def make_trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """Make a quiet trainer: on this world's ranks for a `DappleStrategy`, else on one device."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    here = [WorldEnvironment()] if dist.is_initialized() and isinstance(strategy, DappleStrategy) else []
    devices, plugins = dist.get_world_size() if here else 1, [*here, *options.pop("plugins", [])]
    shared = {"accelerator": SharedGpu()} if here and ON == "cuda" else {}
    own = {"devices": devices, "strategy": strategy, "plugins": plugins}
    return pl.Trainer(**{**QUIET, **shared, **own, **options})


def fit(case: Case, strategy: Any = "auto") -> Fitted:
    """Fit with this strategy in this process."""
    module = make_module(case.name, dtype=case.dtype, dropout=case.dropout).train()
    torch.manual_seed(5)
    losses = Losses()
    trainer = make_trainer(strategy, max_epochs=case.epochs, callbacks=[losses], **case.trainer)
    common = {"dtype": case.dtype, "batch_size": case.batch_size}
    trainer.fit(
        module, make_loader(case.name, shuffle=case.shuffle, **common), make_loader(case.name, seed=1, **common)
    )
    return fitted(trainer, module, losses.losses)


def fitted(trainer: pl.Trainer, module: pl.LightningModule, losses: list[float]) -> Fitted:
    return Fitted(
        {name: p.detach().clone() for name, p in module.named_parameters()},
        {name: b.clone() for name, b in module.named_buffers()},
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        losses,
    )


def fit_as_pipeline(case: Case) -> Fitted:
    """Fit on all ranks of this world; a worker function."""
    return fit(case, dapple(**{"witness": True, **case.options}))


def assert_same(found: Fitted, expected: Fitted, *, rtol: float) -> None:
    """Compare everything two fits have left."""

    def close(a: torch.Tensor, b: torch.Tensor, name: str) -> None:
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol, msg=lambda m: f"{name}: {m}")

    close(torch.tensor(found.losses), torch.tensor(expected.losses), "losses")
    assert found.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        close(torch.tensor(found.metrics[name]), torch.tensor(value), name)
    for name, value in expected.parameters.items():
        close(found.parameters[name], value, name)
    for name, value in expected.buffers.items():
        close(found.buffers[name], value, name)
