"""What is measured is compared with the plan that ran, with all that it gives up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipe.config import DappleConfig
from lightning_pipe.cost.activations import candidates
from lightning_pipe.cost.stage import Cutter
from lightning_pipe.planner.evaluation.evaluate import judge
from lightning_pipe.planner.evaluation.resolve import places_of
from lightning_pipe.planner.problem import Constraints
from lightning_pipe.planner.registry import propose
from lightning_pipe.report import RankPeak
from lightning_pipe.strategy.plans.plan_report import findings
from lightning_pipe.strategy.plans.planning import Planned
from lightning_pipe.strategy.plans.recording import Recorded
from parity.training import problem_of


@pytest.mark.parametrize(("layout", "sharded"), [((1, 1), False), ((2,), True)])
def test_the_comparison_predicts_what_the_planner_did(layout, sharded):
    """It predicted plans that recompute as if they kept all once, so that they seemed to take less memory than said."""
    problem = problem_of("gpt_tied", ranks=2, constraints=Constraints(4, layout, "1f1b", "pa"))
    problem = replace(problem, profile=replace(problem.profile, source="measured"))
    plan = propose(problem, "uniform")[0].plan
    works = Cutter(problem.graph).works(judge(plan, problem).cuts)
    again = [[c.memory for c in candidates(problem.graph, work) if c.is_remakeable] for work in works]
    stages = tuple(
        replace(stage, recompute=places_of(problem.graph, work, memories))
        for stage, work, memories in zip(plan.stages, works, again, strict=True)
    )
    judged = judge(replace(plan, stages=stages, shard_optimizer=sharded), problem)
    measured = tuple(RankPeak(curve.peak_bytes, curve.peak_total_bytes) for curve in judged.curves)
    timelines = (judged.timeline,)
    recorded = Recorded(problem.graph.fingerprint, judged.program, timelines, timelines, measured, {})
    planned = Planned(judged.plan, judged.cuts, problem, (judged,), "", DappleConfig(), may_offload=True)
    found = findings(planned, recorded)
    assert found is not None
    for figures in found.comparison.memory:
        assert figures.saved.predicted == figures.saved.measured, "saved tensors"
        assert figures.total.predicted == figures.total.measured, "all tensors"
    assert found.predicted.makespan == pytest.approx(judged.timeline.makespan)
