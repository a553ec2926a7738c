"""Laws of planning for ranks that do not wait for each other between steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipe.core.milestones import Confirm
from lightning_pipe.planner.evaluation.evaluate import judge
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.simulator import period
from planner.test_uniform import cluster, layers


def problem(**constraints) -> Problem:
    graph, profile = layers([1.0] * 8, [0.0] * 8, samples=8)
    optimizer = replace(profile.optimizer, state_bytes_per_byte=2.0)
    return Problem(
        graph, replace(profile, optimizer=optimizer), cluster(4), 8, constraints=Constraints(8, **constraints)
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_h2", "zb_v"])
def test_a_step_is_judged_by_what_passes_until_the_next(schedule):
    waiting = problem(schedule=schedule, replicas=(1, 1, 1, 1))
    ahead = waiting.ahead(takes_back=False)
    found = propose(ahead, "uniform")[0]
    assert found.step_s == period(found.program, found.prices)
    assert found.step_s <= judge(found.plan, waiting).step_s
    together, alone = (judge(found.plan, one).timeline for one in (waiting, ahead))
    assert tuple(e for e in alone.events if e.instruction != Confirm()) == together.events


def test_auto_takes_a_schedule_without_bubble_where_ranks_run_ahead():
    asked = problem(replicas=(1, 1, 1, 1))
    ahead = propose(asked.ahead(takes_back=False), "auto")[0]
    assert ahead.step_s < propose(asked, "auto")[0].step_s
    assert ahead.step_s == pytest.approx(max(ahead.timeline.busy(rank) for rank in range(4)))


def test_what_takes_a_step_back_counts_as_memory():
    """Parameters, their state of twice that, and gradients are kept once more."""
    asked = problem(schedule="zb_h2", replicas=(1, 1, 1, 1))
    plan = propose(asked, "uniform")[0].plan
    free, kept = (judge(plan, asked.ahead(takes_back=back)) for back in (False, True))
    assert free.peak_bytes == judge(plan, asked).peak_bytes
    own = [kept.prices.state_bytes(rank) - free.prices.state_bytes(rank) for rank in range(4)]
    assert [a - b for a, b in zip(kept.peak_bytes, free.peak_bytes, strict=True)] == own
    sizes = asked.graph.parameter_bytes
    assert sum(own) == 4 * sum(sizes.values())


def test_the_way_back_to_ranks_that_wait():
    asked = problem()
    assert asked.ahead(takes_back=True).waiting == asked
