"""Whether another plan is taken after the first steps: where prediction was wrong, one is better, and it pays."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_pipe.config import DappleConfig
from lightning_pipe.core.cluster import Reduction
from lightning_pipe.planner.evaluation.evaluate import judge
from lightning_pipe.planner.problem import Problem
from lightning_pipe.report import Comparison, compare
from lightning_pipe.strategy.plans import second_plan
from lightning_pipe.strategy.plans.planning import Planned, propose
from lightning_pipe.strategy.plans.second_plan import GAIN, OFF, SecondPlan, steps_left
from planner.test_uniform import cluster, layers

SLOW = 10.0  # times as long as predicted: with it the step takes much longer, and a pipeline is better


def data_parallel(*, sums: float) -> tuple[Planned, Comparison]:
    """Return data parallel training of eight layers, whose sums take so many times as long as predicted."""
    graph, profile = layers([1.0] * 8, [4096] * 8)

    def problem(factor: float) -> Problem:
        reductions = (Reduction((0, 1), 0.0, 40.0 / factor),)
        return Problem(graph, profile, replace(cluster(2), reductions=reductions), 16)

    config = DappleConfig(planner="auto")
    found = propose(problem(1.0), config, given=None)
    judged = next(one for one in found if one.plan.layout.stages == ((0, 1),))
    planned = Planned(judged.plan, judged.cuts, problem(1.0), (judged,), "", config, may_offload=True)
    measured = judge(judged.plan, problem(sums)).timeline
    return planned, compare(judged.timeline, [measured], layout=judged.plan.layout)


def chosen(planned: Planned, comparison: Comparison, **told: Any) -> tuple[Planned | None, str]:
    """Return what is chosen after such a run, and what is said of it."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_plan, "rank_zero_info", said.append)
        other = SecondPlan().choice(planned, comparison, **{"loading": (0, 1), "steps": 1e6, "change_s": 1.0, **told})
    return other, " ".join(said)


def test_a_plan_that_went_as_predicted_stays_without_a_word():
    for sums in (1.0, 1.05):
        planned, comparison = data_parallel(sums=sums)
        assert abs(comparison.step.ratio - 1) <= OFF
        assert chosen(planned, comparison) == (None, "")


def test_a_better_plan_is_taken_and_that_is_said():
    planned, comparison = data_parallel(sums=SLOW)
    assert comparison.step.ratio > 1 + OFF
    other, said = chosen(planned, comparison)
    assert other is not None and "is used from now on" in said
    truth = other.problem
    assert judge(other.plan, truth).step_s < (1 - GAIN) * judge(planned.plan, truth).step_s
    assert judge(planned.plan, truth).step_s == pytest.approx(comparison.step.measured, rel=0.02)


@pytest.mark.parametrize(
    ("told", "word"),
    [
        ({"steps": 1.0, "change_s": 1e6}, "too little for the remaining steps"),
        ({"loading": ()}, "Start with these options instead"),
    ],
)
def test_a_better_plan_that_does_not_pay_or_has_no_data_is_told(told, word):
    other, said = chosen(*data_parallel(sums=SLOW), **told)
    assert other is None and word in said


def test_a_plan_that_is_wrong_and_still_the_best_stays():
    planned, comparison = data_parallel(sums=SLOW)
    fixed = replace(planned, wanted=DappleConfig(planner="uniform", layout="2", microbatches=planned.plan.microbatches))
    other, said = chosen(fixed, comparison)
    assert other is None and "the plan is still the best" in said


def test_what_is_not_explained_changes_nothing():
    """A step is longer than its computes, messages and sums: something else makes it so."""
    planned, comparison = data_parallel(sums=1.0)
    step = replace(comparison.step, measured=2 * comparison.step.predicted)
    assert chosen(planned, replace(comparison, step=step)) == (None, "")


@pytest.mark.parametrize(("factor", "returns"), [(0.9, False), (1.1, True)])
def test_the_faster_of_the_two_as_measured_is_the_last(factor, returns):
    planned, comparison = data_parallel(sums=SLOW)
    second = SecondPlan()
    other = second.choice(planned, comparison, loading=(0, 1), steps=math.inf, change_s=1.0)
    assert other is not None and not second.is_settled
    step = replace(comparison.step, measured=factor * comparison.step.measured)
    last = second.choice(other, replace(comparison, step=step), loading=(0, 1), steps=math.inf, change_s=1.0)
    assert last == (planned if returns else None) and second.is_settled


def test_where_the_number_of_steps_is_not_known_many_are_left():
    assert steps_left(-1, 5) == math.inf == steps_left(math.inf, 5)
    assert (steps_left(7, 5), steps_left(4, 5)) == (2, 0)
