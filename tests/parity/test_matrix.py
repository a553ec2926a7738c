"""Every parity module under every layout and schedule: twenty optimizer steps in float32, on the local transport.

The same pipelines run under the trainer, on real processes, in tests/strategy; here the whole matrix is cheap, because
a module is captured once.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from lightning_pipe.planner.evaluation.resolve import resolve
from lightning_pipe.planner.problem import Constraints, counted_problem
from lightning_pipe.planner.registry import propose
from models.parity import PARITY, make_module
from parity.training import (
    BATCH,
    MICROBATCHES,
    STEPS,
    accumulation,
    assert_same_training,
    captured,
    expected,
    pipeline,
    train,
    whole_batches,
)

UNREPLICATED = ["1", "1-1", "1-1-1"]
REPLICATED = ["2-1", "1-2", "2-2"]
GPIPE_IN_EVERY_RUN = "1-1-1"  # of the layouts
COUPLED = {"resnet_batchnorm"}  # compared with accumulation over the same micro-batches, as batch statistics see them


def under_schedules(layouts: list[str]) -> pytest.MarkDecorator:
    """Run a test for every layout with both schedules."""
    slow = [pytest.param(layout, "gpipe", marks=pytest.mark.slow) for layout in layouts if layout != GPIPE_IN_EVERY_RUN]
    every = [*((layout, "1f1b") for layout in layouts), (GPIPE_IN_EVERY_RUN, "gpipe")]
    return pytest.mark.parametrize(("layout", "schedule"), [*every, *slow])


@functools.cache
def trained(name: str, layout: str, schedule: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the losses and parameters of a module that was trained as a pipeline."""
    module = make_module(name).train()
    return train(module, name, pipeline(module, name, layout=layout, schedule=schedule))


@pytest.mark.sampled
@under_schedules([*UNREPLICATED, *REPLICATED])
@pytest.mark.parametrize("name", PARITY)
def test_training_is_that_of_one_device(name, layout, schedule):
    wanted = expected(name, accumulation if name in COUPLED else whole_batches)
    assert_same_training(trained(name, layout, schedule), wanted)


@pytest.mark.parametrize(("layout", "weights"), [("2-1", ((3, 1),)), ("2-2", ((1, 4), (3, 1)))])
@pytest.mark.parametrize("name", ["gpt_tied", "dict_batch"])
def test_training_with_replicas_in_unequal_parts_is_accumulation(name, layout, weights):
    """Micro-batches of 3, 3 and 2 samples: one to four leaves the first replica without any."""
    module = make_module(name).train()
    update = pipeline(module, name, layout=layout, schedule="1f1b", weights=weights)
    assert_same_training(train(module, name, update), expected(name, accumulation))


@pytest.mark.parametrize(
    "name", ["gpt_tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lstm", "seq2seq"))]
)
def test_dropout_gives_the_same_losses_under_every_unreplicated_layout(name):
    runs = []
    for layout in UNREPLICATED:
        module = make_module(name, dropout=0.3).train()
        update = pipeline(module, name, layout=layout, schedule="1f1b", dropout=0.3)
        runs.append([float(loss) for loss in train(module, name, update)[0]])
    assert runs[0] == runs[1] == runs[2]
    assert len(set(runs[0])) == STEPS


def test_tied_gradients_that_are_added_once_per_step_differ_by_rounding_only():
    """The default: bit-equal but for the tied parameter, whose two sums are added in another order."""
    capture = captured("gpt_tied", 0.0)
    problem = counted_problem(capture.graph, ranks=2, samples=BATCH)
    constraints = Constraints(MICROBATCHES, (1, 1), warmup="pa")
    plan = propose(replace(problem, constraints=constraints), "uniform")[0].plan
    split = capture.split(resolve(plan, capture.graph, ranks=2))
    tied = {
        p
        for ps, b in zip(split.bucket_parameters, split.traffic.buckets, strict=True)
        if len(b.stages) == 2
        for p in ps
    }
    exact = capture.split(resolve(plan, capture.graph, ranks=2), exact_ties=True)
    assert len(tied) == 1
    sent = {
        s: sum(e.fixed_bytes for e in cut.traffic.edges if e.direction == "B")
        for s, cut in (("step", split), ("exact", exact))
    }
    assert sent["step"] == 0 < sent["exact"]
