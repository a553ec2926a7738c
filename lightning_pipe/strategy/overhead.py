"""What does a compute cost beyond its operations? The executor's own work, measured on stages that only use caches."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch

from lightning_pipe.capture.stage_program import Half, RandomKey, Split, StageProgram
from lightning_pipe.core.program import Layout, Traffic
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import Job
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.schedule.gpipe import gpipe
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verify import verify

_MICROBATCHES = 32
_RUNS = 5
_VALUES = 100  # of a stage with many


@dataclass(frozen=True)
class Overhead:
    """Seconds of a compute beyond its operations, and of every tensor that it is given or leaves."""

    call_s: float
    value_s: float


def compute_overhead(device: torch.device) -> Overhead:
    """Return what a compute of a stage without operations costs: medians over some runs, the first left out."""
    few, many = _compute_s(device, 1), _compute_s(device, _VALUES)
    value_s = max(0.0, many - few) / (2 * (_VALUES - 1))  # each is left by one compute and given to another
    return Overhead(max(0.0, few - 2 * value_s), value_s)


def _compute_s(device: torch.device, values: int) -> float:
    layout, traffic = Layout(((0,),)), Traffic((), ())
    sizes = (1,) * _MICROBATCHES
    order = gpipe(layout, _MICROBATCHES)
    program = verify(lower(order, layout=layout, sizes=sizes, traffic=traffic, synchronise=False))
    work = _Work(device)
    split = Split((_stage(work, values),), {}, traffic, (), {})
    executor = Executor(split, layout, state=State({}, {}, device), transport=Hub().endpoint(0))
    job = Job((torch.zeros(_MICROBATCHES, device=device),), (True,), tuple(range(_MICROBATCHES)))
    computes = 2 * _MICROBATCHES  # F and W; there is nothing to be done in I

    def run() -> float:
        work.seconds = 0.0
        started = time.perf_counter()
        run_together([executor], program, [job])
        return (time.perf_counter() - started - work.seconds) / computes

    return statistics.median([run() for _ in range(1 + _RUNS)][1:])


class _Work:
    """Use the caches as operations do, so that the runtime finds them as in training; `seconds` is what that takes."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._tensor = torch.zeros(_WORK, device=device)

    def __call__(self) -> None:
        started = time.perf_counter()
        self._tensor.add_(1.0)
        self.seconds += time.perf_counter() - started


_WORK = 2**20  # elements, 4 MiB


def _stage(work: _Work, values: int) -> StageProgram:
    """Return a stage whose forward leaves views of a leaf to a weight half that does nothing with them."""
    names = tuple(f"value_{k}" for k in range(values))

    def forward(samples: int, key: RandomKey, leaf: torch.Tensor) -> tuple[torch.Tensor, ...]:
        work()
        return (leaf,) * values

    def weight_grad(samples: int, key: RandomKey, *made: torch.Tensor) -> tuple[torch.Tensor, ...]:
        work()
        return ()

    return StageProgram(
        stage=0,
        parameters={},
        buffers={},
        leaves={"leaf": 0},
        tangents=(),
        forward=Half(("leaf",), names, forward),
        input_grad=None,
        weight_grad=Half(names, (), weight_grad),
        receives={},
        sends={},
        mutations={},
        gradients={},
        results=(),
    )
