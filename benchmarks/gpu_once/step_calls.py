"""Section `calls`: what a step in the steady state asks of the device and of the host.

On a GPU torch warns of every operation for which the host waits (`set_sync_debug_mode`), and its profiler counts calls
of CUDA. Each has steps of its own, as counting slows them. On a CPU the profiler counts operators, reads of single
numbers, and copies.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.fits import fit_module
from benchmarks.gpu import Contestant, Workload
from benchmarks.gpu_once.findings import Assignment
from benchmarks.gpu_once.fits import LEAST_S, TINY, on_device
from benchmarks.gpu_once.sections import CPU, CUDA
from benchmarks.ranks import run_ranks
from lightning_pipe import DappleStrategy

STEADY, COUNTED = 6, 4  # steps before the first that is counted, and steps of either count
MIDDLE = Workload(width=512, depth=6, batch=8)
PLACES = 6
COMMON = {"costs": "counted", "planner": "uniform", "cache": "off", "replan": False}
RUNTIME = (
    "cudaLaunchKernel cudaGraphLaunch cudaMemcpyAsync cudaStreamSynchronize cudaDeviceSynchronize cudaEventSynchronize "
    "cudaMalloc cudaFree cudaHostAlloc cudaEventQuery cudaStreamWaitEvent"
).split()
ALIASES = dict.fromkeys(("cuLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC"), "cudaLaunchKernel")
OPERATORS = "operators"
COUNTED_CALLS = {  # as a finding names them -> as the profiler does
    **{name: name for name in (OPERATORS, *RUNTIME)},
    "numbers read": "aten::_local_scalar_dense",
    "copies": "aten::copy_",
}


@dataclass(frozen=True)
class Case:
    """A fit whose calls are counted.

    Attributes:
        contestant: ranks and options of the strategy.
        trainer: options of the trainer.
        devices: where it is counted.
    """

    contestant: Contestant
    trainer: Mapping[str, Any]
    devices: tuple[str, ...] = (CUDA,)


BF16 = {"precision": "bf16-mixed"}
FOUR = Contestant(1, {"microbatches": 4, **COMMON})
CASES = {
    "plain bf16": Case(Contestant(1), BF16, (CUDA, CPU)),
    "bf16": Case(FOUR, BF16),
    "bf16, clip": Case(FOUR, {**BF16, "gradient_clip_val": 1.0}),
    "16-mixed": Case(FOUR, {"precision": "16-mixed"}),
    "replay": Case(Contestant(1, {"microbatches": 4, "capture": "replay", **COMMON}), BF16),
    "32": Case(FOUR, {"precision": "32-true"}),
    "1-1 bf16": Case(Contestant(2, {"layout": "1-1", "microbatches": 4, **COMMON}), BF16, (CUDA, CPU)),
}


@dataclass(frozen=True)
class Counts:
    """Calls per step of a rank: lines of Python that wait for the device, and calls by name."""

    waits: Mapping[str, float]
    calls: Mapping[str, float]


def calls(assignment: Assignment) -> None:
    """Report waits and calls per step of every case and rank.

    Raises:
        SystemExit: if a case has failed.
    """
    workload = replace(MIDDLE if assignment.device == CUDA else TINY, warm_up=STEADY, steps=2 * COUNTED)
    failed = list[str]()
    for name, case in CASES.items():
        if assignment.device not in case.devices:
            continue
        if assignment.remaining_s() < LEAST_S:
            assignment.report(f"{name}: no time left")
            continue
        contestant = on_device(case.contestant, assignment.device)
        function = partial(count, workload, contestant.options, case.trainer)
        try:
            deadline_s = assignment.remaining_s() - LEAST_S / 2
            ranks: list[Counts] = run_ranks(contestant.ranks, function, deadline_s=deadline_s)
        except RuntimeError as error:
            failed.append(name)
            assignment.report(f"{name}: FAILED: {' | '.join(str(error).splitlines()[-4:])[-400:]}")
            continue
        for rank, counts in enumerate(ranks):
            numbers = ", ".join(f"{call} {number:.1f}" for call, number in counts.calls.items())
            assignment.report(f"{name}, rank {rank}: per step {numbers}")
            for place, number in [*counts.waits.items()][:PLACES]:
                assignment.report(f"   {number:.1f} waits per step at {place}")
    if failed:
        raise SystemExit(1)


def count(workload: Workload, options: Mapping[str, Any] | None, trainer: Mapping[str, Any]) -> Counts:
    """Fit on this rank with options of strategy and trainer, and count in the steps of the steady state."""
    strategy: Any = "auto" if options is None else DappleStrategy(**options)
    counter = StepCounter(on_cuda=workload.device == CUDA)
    accelerator = workload.accelerator()
    fit_module(workload.module(), workload.text(), strategy, callback=counter, accelerator=accelerator, **trainer)
    return counter.counts()


class StepCounter(pl.Callback):
    """Count waits over `COUNTED` steps, then calls over as many.

    Args:
        on_cuda: whether the module trains on a GPU.
    """

    def __init__(self, *, on_cuda: bool) -> None:
        self._on_cuda = on_cuda
        self._warnings: list[warnings.WarningMessage] = []
        self._counting = ExitStack()
        cuda = [ProfilerActivity.CUDA] if on_cuda else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *cuda])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to count."""
        if batch_idx == STEADY:
            self._warnings = self._counting.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            self._set_debug_mode("warn")
        if batch_idx == STEADY + COUNTED:
            self._set_debug_mode("default")
            self._counting.close()
            self._counting.enter_context(self._profile)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the counting."""
        if batch_idx == STEADY + 2 * COUNTED - 1:
            self._counting.close()

    def counts(self) -> Counts:
        """Return waits and calls per step."""
        waits = Counter(_place(warning) for warning in self._warnings if "synchroniz" in str(warning.message))
        calls = Counter[str]()
        for event in self._profile.key_averages():
            name = ALIASES.get(event.key, event.key)
            names = (OPERATORS, name) if name.startswith("aten::") else (name,)
            calls.update(dict.fromkeys(names, event.count))
        return Counts(
            {place: number / COUNTED for place, number in waits.most_common()},
            {call: calls[name] / COUNTED for call, name in COUNTED_CALLS.items() if calls[name]},
        )

    def _set_debug_mode(self, mode: str) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode(mode)


def _place(warning: warnings.WarningMessage) -> str:
    """Return the file, with two of its folders, and the line of a warning."""
    return f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"
