"""What `exhaustive` promises: its bounds are bounds, so what it returns is the best of all plans."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from benchmarks.planners.exhaustive import Size, random_problem
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.candidates.moves import groupings
from lightning_pipe.planner.estimates.bound_terms import Parts
from lightning_pipe.planner.estimates.lower_bounds import CandidateBatch
from lightning_pipe.planner.evaluation.evaluate import Judge
from lightning_pipe.planner.portfolio.exhaustive import exhaustive
from lightning_pipe.planner.problem import Constraints, Problem
from planner.test_uniform import cluster, layers

ROUNDING = 1e-9


def drawn_outlines(draw: random.Random, problem: Problem, count: int) -> list[Candidate]:
    nodes = len(problem.graph.nodes)
    layouts = [ranks for ranks in groupings(range(problem.cluster.ranks)) if len(ranks) <= nodes]
    found = []
    for _ in range(count):
        ranks = draw.choice(layouts)
        cuts = tuple(sorted(draw.sample(range(1, nodes), len(ranks) - 1)))
        microbatches = draw.randint(1, problem.samples // max(map(len, ranks)))
        depths = tuple(sorted((draw.randint(1, microbatches) for _ in ranks), reverse=True))
        found.append(Candidate(cuts, ranks, microbatches, depths))
    return found


def tried(kind: str) -> Problem:
    seed, _, how = kind.partition(" ")
    problem = random_problem(int(seed))
    if how == "coupled":
        return replace(problem, graph=replace(problem.graph, coupled=(problem.graph.nodes[-1].name,)))
    return replace(problem, training=how != "forward")


@pytest.mark.parametrize("kind", [*map(str, range(20)), "2 forward", "5 forward", "3 coupled", "13 coupled"])
def test_no_plan_is_quicker_or_smaller_than_its_bounds(kind):
    problem = tried(kind)
    judge = Judge(problem)
    parts = Parts(problem, judge.pricer)
    for outline in drawn_outlines(random.Random(kind), problem, 4):
        judged = judge.judge(outline.plan(problem))
        field = CandidateBatch(parts, [(outline.cuts, outline.ranks)], outline.microbatches)
        seconds, lacking = float(field.seconds(outline.depths)[0]), float(field.lacking(outline.depths)[0])
        assert seconds <= judged.step_s * (1 + ROUNDING), outline
        assert seconds >= judged.step_s * 0.9, f"the bound of {outline} is too low to be of use"
        assert lacking <= judged.overflow(problem.cluster) + ROUNDING, outline


def test_plans_are_bounded_together_as_each_alone():
    problem = random_problem(2)
    parts = Parts(problem, Judge(problem).pricer)
    plans = [((2, 4, 6), ((0,), (1,), (2,), (3,))), ((1, 3, 5), ((3,), (1,), (0,), (2,)))]
    both = CandidateBatch(parts, plans, 6)
    for depths in ((4, 3, 2, 1), (6, 6, 3, 1)):
        alone = [CandidateBatch(parts, [plan], 6) for plan in plans]
        assert both.seconds(depths).tolist() == [float(field.seconds(depths)[0]) for field in alone]
        assert both.lacking(depths).tolist() == [float(field.lacking(depths)[0]) for field in alone]


def every_outline(problem: Problem) -> list[Candidate]:
    nodes, samples = len(problem.graph.nodes), problem.samples
    found = []
    for ranks in groupings(range(problem.cluster.ranks)):
        for cuts in itertools.combinations(range(1, nodes), len(ranks) - 1):
            for count in range(1, samples // max(map(len, ranks)) + 1):
                for depths in itertools.product(range(1, count + 1), repeat=len(ranks)):
                    if all(a >= b for a, b in itertools.pairwise(depths)):
                        found.append(Candidate(cuts, ranks, count, depths))
    return found


@pytest.mark.parametrize("seed", range(1, 7))
def test_no_plan_at_all_is_better(seed):
    problem = replace(random_problem(seed, Size(layers=4, devices=2)), samples=5)
    judge = Judge(problem)
    ranks = [judge.judge(outline.plan(problem)).rank(problem.cluster) for outline in every_outline(problem)]
    found = exhaustive(problem)[0].rank(problem.cluster)
    assert found == pytest.approx(min(ranks), rel=ROUNDING)


def test_plans_that_fit_are_found_where_no_policy_of_warmup_fits():
    """Depths were once tried only near a plan that fits; of this problem none did that followed a policy."""
    problem = random_problem(100)
    found = exhaustive(problem)[0]
    assert found.overflow(problem.cluster) <= 0, found.plan


def test_too_many_plans_are_not_tried():
    graph, profile = layers([1] * 40, [8] * 40)
    with pytest.raises(PlanError, match=r"would try \d+ plans"):
        exhaustive(Problem(graph, profile, cluster(5), 16))


def test_wished_warmups_are_kept_to():
    graph, profile = layers([1, 2, 1, 2], [8] * 4)
    free = Problem(graph, profile, cluster(2), 4, constraints=Constraints(microbatches=4, replicas=(1, 1)))
    for warmup, spelled in (("pa", "pa"), ("pb", "pb"), ("2", "2,2"), ("4,1", "4,1")):
        found = exhaustive(replace(free, constraints=replace(free.constraints, warmup=warmup)))[0]
        assert found.plan.options["warmup"] == spelled
        assert found.step_s >= exhaustive(free)[0].step_s * (1 - ROUNDING), warmup
