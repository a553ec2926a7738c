"""Names of Lightning, from the package that is used (`lightning_package`): `lightning` or `pytorch_lightning`.

Everything else of this package imports Lightning's public names from here, and private ones from
`strategy/lightning_private.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_pipe.lightning_package import name_in_use

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, TorchCheckpointIO
    from lightning.fabric.utilities.seed import pl_worker_init_function
    from lightning.fabric.utilities.throughput import Throughput, get_available_flops
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import (
        BasePredictionWriter,
        Checkpoint,
        EarlyStopping,
        OnExceptionCheckpoint,
        ThroughputMonitor,
    )
    from lightning.pytorch.loggers import Logger, TensorBoardLogger
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_only, rank_zero_warn
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.seed import isolate_rng
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
else:
    _MODULES = {
        "fabric.plugins": "CheckpointIO ClusterEnvironment TorchCheckpointIO",
        "fabric.utilities.seed": "pl_worker_init_function",
        "fabric.utilities.throughput": "Throughput get_available_flops",
        "pytorch.accelerators": "Accelerator",
        "pytorch.callbacks": "BasePredictionWriter Checkpoint EarlyStopping OnExceptionCheckpoint ThroughputMonitor",
        "pytorch.loggers": "Logger TensorBoardLogger",
        "pytorch.plugins.precision": "HalfPrecision MixedPrecision Precision",
        "pytorch.strategies": "ParallelStrategy",
        "pytorch.trainer.states": "TrainerFn",
        "pytorch.utilities": "CombinedLoader rank_zero_info rank_zero_only rank_zero_warn",
        "pytorch.utilities.exceptions": "SIGTERMException",
        "pytorch.utilities.model_helpers": "is_overridden",
        "pytorch.utilities.seed": "isolate_rng",
        "pytorch.utilities.signature_utils": "is_param_in_hook_signature",
    }
    pl = import_module(name_in_use("pytorch"))
    for _module, _names in _MODULES.items():
        for _name in _names.split():
            globals()[_name] = getattr(import_module(name_in_use(_module)), _name)

__all__ = [
    "Accelerator",
    "BasePredictionWriter",
    "Checkpoint",
    "CheckpointIO",
    "ClusterEnvironment",
    "CombinedLoader",
    "EarlyStopping",
    "HalfPrecision",
    "Logger",
    "MixedPrecision",
    "OnExceptionCheckpoint",
    "ParallelStrategy",
    "Precision",
    "SIGTERMException",
    "TensorBoardLogger",
    "Throughput",
    "ThroughputMonitor",
    "TorchCheckpointIO",
    "TrainerFn",
    "callbacks_of",
    "get_available_flops",
    "is_overridden",
    "is_param_in_hook_signature",
    "isolate_rng",
    "lightning_module",
    "pl",
    "pl_worker_init_function",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]


def callbacks_of(trainer: pl.Trainer) -> list[pl.Callback]:
    """Return the callbacks of a trainer."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it, undeclared
    return callbacks


def lightning_module(name: str) -> Any:
    """Return a module of Lightning by its name in both packages, such as "pytorch.trainer.call"."""
    return import_module(name_in_use(name))
