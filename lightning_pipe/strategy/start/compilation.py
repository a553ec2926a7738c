"""Compilation of the stages of captured steps (`compile`, `cuda_graphs`): each rank compiles what it runs, all at once.

A function is compiled once for every number of samples that it runs on; steps that bring ever new sizes are not
compiled for all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import torch

from lightning_pipe.capture.stages.compiled_stages import CompiledStages, HalfKind
from lightning_pipe.capture.stages.cuda_recorder import CudaRecorder, LaunchRecorder
from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.core.program import AnyCompute, Program
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.schedule.rules import Dataflow
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

log = logging.getLogger(__name__)

_MOST_PROGRAMS = 8  # that are compiled; later ones, of batches of other sizes or lengths, run as they are
_HALVES: dict[str, tuple[HalfKind, ...]] = {"F": ("F",), "I": ("I",), "W": ("W",), "B": ("I", "W")}


class Compilation:
    """Compile the steps of one rank.

    Args:
        device: where it computes.
        trials: whether compiled functions are compared with the plain ones when they first run.
        kernels: whether kernels are compiled.
        recorder: records what functions launch; None if that is not wanted.
    """

    def __init__(self, device: torch.device, *, trials: bool, kernels: bool, recorder: LaunchRecorder | None) -> None:
        self._device, self._trials, self._kernels, self._recorder = device, trials, kernels, recorder
        self._programs = 0

    def of(self, split: Split) -> StepCompilation:
        """Return the stages of a step, to be compiled."""
        stages = CompiledStages(
            split, self._device, trials=self._trials, kernels=self._kernels, recorder=self._recorder
        )
        return StepCompilation(stages, self)

    def admits(self) -> bool:
        """Count a program; return whether it is to be compiled."""
        self._programs += 1
        if self._programs == _MOST_PROGRAMS + 1:
            log.warning(
                "Batches have had %d kinds of sizes or lengths, for which the stages were compiled; further ones run "
                "uncompiled. Pad batches to a few lengths, or drop the last batch (drop_last=True).",
                _MOST_PROGRAMS,
            )
        return self._programs <= _MOST_PROGRAMS


class StepCompilation:
    """The stages of one step, compiled for the programs that run them.

    Args:
        stages: the stages.
        admission: decides which programs are compiled.

    Attributes:
        split: the stages that run.
    """

    def __init__(self, stages: CompiledStages, admission: Compilation) -> None:
        self._stages, self._admission = stages, admission
        self.split = stages.split

    def compile_for(self, program: Program, *, control: ControlPlane) -> None:
        """Compile what this rank runs in a program; on all ranks together, which wait for each other after each."""
        if not self._stages.can_be_compiled:
            rank_zero_warn(
                "compile and cuda_graphs have no effect on a step that is replayed, or whose graph holds for one "
                "number of samples only: its operations are not known before they run."
            )
            return
        if not self._admission.admits():
            return
        begin, compiled = time.perf_counter(), 0
        wanted = list(dict.fromkeys(_functions(program, control.rank)))
        left = torch.tensor([len(wanted)])
        while int(control.sum(left, what="functions that are compiled")):
            if wanted:
                compiled += self._stages.compile(*wanted.pop())
            left = torch.tensor([len(wanted)])
        if compiled:
            log.info("Compiled %d functions in %.1f s.", compiled, time.perf_counter() - begin)


def recorder_of(device: torch.device) -> LaunchRecorder | None:
    """Return what records launches on a device; None, with a warning, if nothing does."""
    if device.type == "cuda":
        return CudaRecorder(device)
    rank_zero_warn(f"cuda_graphs=True has no effect on {device.type}: only CUDA records launches.")
    return None


def _functions(program: Program, rank: int) -> Iterator[tuple[int, HalfKind, int]]:
    """Yield stage, function and number of samples of what a rank computes."""
    flow = Dataflow.of(program)
    for compute in program.ranks[rank]:
        if isinstance(compute, AnyCompute) and (count := flow.count(compute, rank=rank)):
            yield from ((compute.stage, kind, count) for kind in _HALVES[compute.kind])
