"""What ranks keep under any schedule is what was predicted, to the byte."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from lightning_pipe.capture import flatten
from lightning_pipe.core.plan import microbatch_sizes
from lightning_pipe.core.program import Joined
from lightning_pipe.planner.evaluation.evaluate import Judged, judge
from lightning_pipe.planner.problem import Constraints
from lightning_pipe.planner.registry import propose
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from lightning_pipe.schedule import SCHEDULES
from lightning_pipe.schedule.construct.layout_shapes import both_ways
from models.parity import make_module
from parity.training import BATCH, captured, loader, problem_of


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_peak_of_the_runtime_is_that_of_the_simulator(schedule):
    """Where neighbouring stages share a rank, what one hands to the other is predicted in both, and there once."""
    rng = random.Random(schedule)
    ranks = rng.choice((2, 4) if SCHEDULES[schedule].shape is both_ways else (2, 3, 4))
    microbatches, name = rng.randint(2, 8), "gpt_tied"
    problem = problem_of(name, ranks=ranks, wishes=Constraints(microbatches, (1,) * ranks, schedule))
    check_peaks(propose(problem, "uniform")[0], name, microbatches)


@pytest.mark.parametrize(
    "options", [{"join": 2}, {"join": 8}, {"join": 3, "base": "gpipe"}, {"join": 8, "delay": "idle"}]
)
def test_so_it_is_with_joined_w(options):
    problem = problem_of("gpt_tied", ranks=3, wishes=Constraints(5, (1, 1, 1), "2bp"))
    judged = judge(replace(propose(problem, "uniform")[0].plan, options=options), problem)
    assert any(isinstance(x, Joined) for line in judged.program.ranks for x in line)
    check_peaks(judged, "gpt_tied", 5)


def check_peaks(judged: Judged, name: str, microbatches: int) -> None:
    ranks = judged.plan.layout.ranks
    layout, capture = judged.plan.layout, captured(name, 0.0)
    split, hub, module = capture.split(judged.cuts), Hub(), make_module(name).train()
    state = State(
        dict(module.named_parameters(remove_duplicate=False)), dict(module.named_buffers()), torch.device("cpu")
    )
    executors = [
        Executor(split, layout, state=state, transport=hub.endpoint(rank), loss=capture.record.loss)
        for rank in range(ranks)
    ]
    tensors, structure = flatten(loader(name)[0])
    sizes = microbatch_sizes(BATCH, microbatches)
    leaves, cut = capture.with_totals(tensors, cut=structure.cut(), sizes=sizes, buffers=state.buffers)
    job = BatchInput(leaves, cut, tuple(itertools.accumulate((0, *sizes[:-1]))))
    outcomes = run_together(executors, judged.program, [job] * ranks, record_memory=True)
    for rank, (outcome, curve) in enumerate(zip(outcomes, judged.curves, strict=True)):
        peak = max(held for _, held in outcome.memory)
        handed = any(set(a) & set(b) & {rank} for a, b in itertools.pairwise(layout.stages))
        assert peak == curve.peak_bytes or (handed and peak < curve.peak_bytes), (rank, peak, curve.peak_bytes)
