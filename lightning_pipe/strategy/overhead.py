"""What does a compute cost beyond its operations? The executor's own work, measured on a stage that does nothing."""

from __future__ import annotations

import statistics
import time

import torch

from lightning_pipe.capture.stage_program import Half, Split, StageProgram
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


def compute_overhead_s(device: torch.device) -> float:
    """Return the seconds of one compute of an empty stage: median over some runs, the first left out."""
    layout, traffic = Layout(((0,),)), Traffic((), ())
    sizes = (1,) * _MICROBATCHES
    order = gpipe(layout, _MICROBATCHES)
    program = verify(lower(order, layout=layout, sizes=sizes, traffic=traffic, synchronise=False))
    state = State({}, {}, device)
    executor = Executor(Split((_EMPTY,), {}, traffic, (), {}), layout, state=state, transport=Hub().endpoint(0))
    job = Job((torch.zeros(_MICROBATCHES, device=device),), (True,), tuple(range(_MICROBATCHES)))
    computes = 3 * _MICROBATCHES  # F, I, W

    def run() -> float:
        started = time.perf_counter()
        run_together([executor], program, [job])
        return (time.perf_counter() - started) / computes

    return statistics.median([run() for _ in range(1 + _RUNS)][1:])


_EMPTY = StageProgram(
    stage=0,
    parameters={},
    buffers={},
    leaves={"leaf": 0},
    tangents=(),
    forward=Half(("leaf",), ("made",), lambda samples, key, leaf: (leaf,)),
    input_grad=Half(("made",), ("kept",), lambda samples, key, made: (made,)),
    weight_grad=Half(("kept",), (), lambda samples, key, kept: ()),
    receives={},
    sends={},
    mutations={},
    gradients={},
    results=(),
)
