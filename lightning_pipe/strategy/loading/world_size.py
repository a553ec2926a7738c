"""What the user's code makes of `trainer.world_size`: scaling for data parallelism, which a pipeline must not have.

Recipes for several devices multiply learning rates by the number of ranks, or divide the batch by it, since each rank
has a batch of its own there. In a pipeline all ranks work on the same batch. The number is right, so it is returned,
and the line that reads it is named once.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning_pipe.capture.python.users_code import is_library
from lightning_pipe.capture.torch_private import answered_alone
from lightning_pipe.lightning_names import ClusterEnvironment, ThroughputMonitor, callbacks_of, pl, rank_zero_warn
from lightning_pipe.lightning_package import TRAINERS
from lightning_pipe.strategy.lightning_private import throughputs

_TRAINER = tuple(f"/{package.replace('.', '/')}/trainer/trainer.py" for package in TRAINERS.values())


# What launchers tell processes: each of these is 0 of one process, where there is one, too.
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_SIZES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_ALWAYS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


class WorldSizeReads:
    """The lines that have read the world size so far."""

    def __init__(self) -> None:
        self._lines: set[str] = set()

    def note(self, world_size: int) -> None:
        """Name the user's line that asks for the world size, once; called by the property that is asked."""
        frame = sys._getframe(2)
        if frame.f_code.co_name == "world_size" and frame.f_code.co_filename.endswith(_TRAINER):
            assert frame.f_back is not None, "the trainer's property was read by somebody"
            frame = frame.f_back
        path, line = frame.f_code.co_filename, frame.f_lineno
        if world_size == 1 or is_library(path) or path.startswith("<") or f"{path}:{line}" in self._lines:
            return
        self._lines.add(f"{path}:{line}")
        rank_zero_warn(
            f"{path}:{line} in {frame.f_code.co_name} reads world_size = {world_size}. All {world_size} ranks of a "
            "pipeline work on one batch: do not multiply learning rates or divide batches and data by it."
        )


class WholeData:
    """Code of loaders that divides the data by rank: it is told that there is one process, and named once.

    Every batch of a pipeline is a whole batch, so whoever takes every n-th sample (`get_rank()`, `get_world_size()`, or
    what a launcher has put into the environment) would train on a part of the data.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, *, ranks: int) -> None:
        self._lines: set[str] = set()
        self._ranks = ranks

    def while_loading(self) -> AbstractContextManager[None]:
        """Answer questions for rank and world size as on one device, inside."""
        return self._alone() if self._ranks > 1 else nullcontext()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        real = {name: os.environ[name] for name in (*_RANKS, *_SIZES) if name in os.environ}
        os.environ.update({**_ALWAYS, **{name: "0" if name in _RANKS else "1" for name in real}})
        try:
            with answered_alone(self._is_told):
                yield
        finally:
            for name in _ALWAYS.keys() - real.keys():
                os.environ.pop(name, None)
            os.environ.update(real)

    def _is_told(self, frame: types.FrameType) -> bool:
        path = frame.f_code.co_filename
        if is_library(path) or isinstance(frame.f_locals.get("self"), ClusterEnvironment):
            return False
        if (line := f"{path}:{frame.f_lineno}") not in self._lines:
            self._lines.add(line)
            rank_zero_warn(
                f"{line} in {frame.f_code.co_name} asks torch.distributed for its rank or the world size while data is "
                "loaded. It is told that there is one process, so that it does not divide the data: every batch of a "
                "pipeline is a whole batch."
            )
        return True


def measure_whole_batches(trainer: pl.Trainer, *, ranks: int) -> None:
    """Let throughput monitors count every batch once, and the arithmetic of all devices."""
    for callback in callbacks_of(trainer):
        if isinstance(callback, ThroughputMonitor):
            for throughput in throughputs(callback):
                if throughput.world_size != 1:
                    throughput.world_size = 1
                    if throughput.available_flops is not None:
                        throughput.available_flops *= ranks
