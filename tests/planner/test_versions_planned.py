"""Laws of plans whose pipeline is never flushed: priced by a round in the middle of many, with bytes of versions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipe.core.profile import OptimizerProfile
from lightning_pipe.core.serial import to_yaml
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.evaluation.evaluate import judge, predicted_round
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import PLANNERS, propose
from lightning_pipe.schedule.weights import POLICIES
from planner.test_uniform import cluster, layers

UNIT = 3.0  # seconds of F, I and W of a rank's share, for one micro-batch


def problem(microbatches: int | None = 8, *, memory: int = 10**6, **constraints) -> Problem:
    """Return twelve equal layers for four devices; a rank's share takes a unit for F, for I and for W."""
    graph, profile = layers([1.0] * 12, [0.0] * 12, samples=8)
    optimizer = OptimizerProfile(state_bytes_per_byte=2.0)
    asked = Constraints(microbatches, **constraints)
    return Problem(graph, replace(profile, optimizer=optimizer), cluster(4, memory=memory), 8, constraints=asked)


STRAIGHT = {"replicas": (1, 1, 1, 1), "schedule": "1f1b"}


@pytest.mark.parametrize("name", POLICIES)
def test_a_round_takes_the_work_of_the_busiest_rank(name: str) -> None:
    """What is flushed takes p - 1 times F and B longer; what clips by norm waits for the last gradient to come back."""
    flushed = problem(**STRAIGHT)
    plan = propose(flushed, "uniform")[0].plan
    asked = flushed.with_versions(name)
    rounds, clipped = judge(plan, asked), judge(plan, replace(asked, steps_together=True))
    busiest = max(rounds.timeline.busy(rank) for rank in range(4))
    assert rounds.step_s == pytest.approx(busiest)
    assert rounds.step_s < clipped.step_s < judge(plan, flushed).step_s
    assert predicted_round(rounds.program, rounds.prices, asked) == rounds.timeline
    assert rounds.timeline.since + rounds.step_s == pytest.approx(max(e.end for e in rounds.timeline.events))


def test_bytes_of_versions_belong_to_the_state_and_copies_to_the_step() -> None:
    """PipeDream keeps ceil(ahead / T) copies beside the present weights, 2BW one on every rank."""
    for count, ahead in ((8, [1, 1, 1, 0]), (2, [2, 1, 1, 0]), (1, [3, 2, 1, 0])):
        flushed = problem(count, **STRAIGHT)
        plan = propose(flushed, "uniform")[0].plan
        plain = judge(plan, flushed).prices
        stash, double = (judge(plan, flushed.with_versions(name)).prices for name in ("pipedream", "2bw"))
        one = [double.state_parts(rank).versions for rank in range(4)]
        assert one == [plain.state_parts(rank).parameters for rank in range(4)]
        read = [sum(held.copied for held in stash.version_bytes(rank)) for rank in range(4)]
        assert [stash.state_parts(r).versions for r in range(4)] == [a * b for a, b in zip(ahead, read, strict=True)]
        assert [stash.state_bytes(r) - plain.state_bytes(r) for r in range(4)] == [
            stash.state_parts(r).versions for r in range(4)
        ]
    costs = replace(flushed.profile.optimizer, copy_s_per_byte=0.5)
    slow = replace(flushed, profile=replace(flushed.profile, optimizer=costs)).with_versions("2bw")
    assert [judge(plan, slow).prices.step_s(r) for r in range(4)] == [0.5 * size for size in one]


@pytest.mark.parametrize("planner", ["auto", *PLANNERS])
def test_planners_plan_what_rounds_can_run(planner: str) -> None:
    """A pipeline of one stage per rank, within memory; none chooses versions by itself, and plans do not name them."""
    flushed = problem(None)
    found = propose(flushed.with_versions("2bw"), planner)
    assert all(judged.policy is POLICIES["2bw"] and len(judged.plan.stages) > 1 for judged in found)
    assert found[0].step_s <= min(judged.step_s for judged in found)
    assert "versions" not in to_yaml(found[0].plan)
    assert all(judged.policy is None for judged in propose(flushed, planner))


def test_auto_is_no_slower_than_any_planner() -> None:
    asked = problem(None).with_versions("pipedream")
    best = propose(asked, "auto")[0].step_s
    assert all(best <= propose(asked, name)[0].step_s * (1 + 1e-9) for name in PLANNERS)


def test_memory_is_kept_with_versions() -> None:
    """What fits without copies may not fit with them; then fewer samples are in flight, or nothing fits."""
    flushed = problem(8, **STRAIGHT)
    plan = propose(flushed, "uniform")[0].plan
    sync, double = (max(judge(plan, one).peak_bytes) for one in (flushed, flushed.with_versions("2bw")))
    assert sync < double
    between = problem(8, memory=double - 1, **STRAIGHT)
    assert propose(between, "auto")[0].overflow(between.cluster) <= 0
    tight = between.with_versions("2bw")
    for policies in ((), ("recompute", "offload")):  # what is saved is too little to help
        asked = replace(tight, constraints=replace(tight.constraints, memory_policies=frozenset(policies)))
        with pytest.raises(PlanError, match="No plan fits into memory"):
            propose(asked, "auto")


def test_what_has_no_rounds_is_refused() -> None:
    asked = problem(8).with_versions("2bw")
    with pytest.raises(PlanError, match="data parallel training"):
        propose(replace(asked, constraints=replace(asked.constraints, replicas=(4,))), "auto")
    with pytest.raises(PlanError, match="exhaustive"):
        propose(asked, "exhaustive")
