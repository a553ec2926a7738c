"""What `auto` promises: no planner proposes better, little is better at all, and what does not fit is said."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.planners.exhaustive import SAME, Size, random_problem, solve
from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.estimates.bound_terms import Parts
from lightning_pipe.planner.evaluation.evaluate import Judge
from lightning_pipe.planner.portfolio.neighborhood import Neighborhood
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import FOLLOW_LAYOUTS, PLANNER_NAMES, PLANNERS, propose
from planner.test_uniform import cluster, layers

SMALL = Size(layers=5, devices=3)


@pytest.mark.parametrize("seed", range(6))
def test_no_planner_proposes_a_better_plan(seed):
    problem = random_problem(seed + 100, SMALL)
    problem = replace(problem, cluster=cluster(problem.cluster.ranks))
    best = propose(problem, "auto")[0]
    for planner in PLANNERS:
        try:
            other = propose(problem, planner)[0]
        except PlanError:
            continue  # too few operations for one stage per rank
        assert best.step_s <= other.step_s * (1 + SAME), planner


def test_the_best_plan_of_all_is_found():
    solved = [solve(seed, SMALL) for seed in range(200, 212)]
    assert [one.ratio for one in solved] == pytest.approx([1.0] * len(solved), abs=0.03)
    assert sum(one.ratio <= 1 + SAME for one in solved) >= len(solved) - 1


@pytest.mark.parametrize("seed", [5])
def test_what_fits_is_found_where_estimates_say_that_nothing_does(seed):
    """Estimates add messages to a workspace that has them already, and few plans of this problem fit."""
    problem = random_problem(seed)
    assert propose(problem, "auto")[0].overflow(problem.cluster) <= 0


@pytest.mark.parametrize("seed", [137, 154, 165])
def test_every_replica_gets_the_samples_that_it_wants(seed):
    """SPP once gave 8 micro-batches of 1 sample to 4 replicas, of which three had nothing to do."""
    problem = random_problem(seed)
    proposed = [outline for planner in PLANNERS.values() for outline in outlines_of(planner, problem)]
    assert all(problem.samples >= one.microbatches * max(map(len, one.ranks)) for one in proposed), proposed
    plan = propose(problem, "auto")[0].plan
    assert problem.samples >= plan.microbatches * max(len(stage.ranks) for stage in plan.stages), plan


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("planner", ["auto", "exhaustive"])
def test_no_rank_is_idle_where_a_plan_fits_in_which_none_is(planner, microbatches):
    """A replayed step of one micro-batch was planned for two replicas "in turn", of which one had nothing to do."""
    for seed in range(100, 106):
        problem = random_problem(seed, SMALL)
        graph = replace(problem.graph, coupled=tuple(node.name for node in problem.graph.nodes))
        constraints = replace(problem.constraints, microbatches=microbatches)
        problem = replace(problem, graph=graph, constraints=constraints, cluster=cluster(problem.cluster.ranks))
        assert propose(problem, planner)[0].plan.idle_ranks == (), seed


def outlines_of(planner, problem):
    try:
        return planner(problem)
    except PlanError:  # too few operations
        return []


def test_plans_over_memory_are_never_returned():
    graph, profile = layers([1] * 4, [8000] * 4)
    roomy = Problem(graph, profile, cluster(2), 16)
    peaks = [max(judged.peak_bytes) for judged in propose(roomy, "auto")]
    tight = replace(roomy, cluster=cluster(2, memory=sorted(peaks)[len(peaks) // 2]))
    for planner in PLANNER_NAMES:
        assert propose(tight, planner)[0].overflow(tight.cluster) <= 0, planner
    hopeless = replace(roomy, cluster=cluster(2, memory=100))
    for planner in PLANNER_NAMES:
        with pytest.raises(PlanError, match=r"No plan fits into memory.*too little. What would help: devices with"):
            propose(hopeless, planner)


def test_wishes_are_kept_to():
    graph, profile = layers([1, 1, 2, 2, 1, 1], [8] * 6)
    constraints = Constraints(microbatches=4, replicas=(2, 1), warmup="2")
    for planner in ("auto", "uniform", "exhaustive"):
        plan = propose(Problem(graph, profile, cluster(3), 16, constraints=constraints), planner)[0].plan
        assert [stage.ranks for stage in plan.stages] == [(0, 1), (2,)]
        assert (plan.microbatches, plan.options) == (4, {"warmup": "2,2"})


def test_layouts_that_cannot_be_are_refused():
    graph, profile = layers([1] * 4, [8] * 4)
    asked = Problem(graph, profile, cluster(3), 16, constraints=Constraints(replicas=(2, 2)))
    with pytest.raises(PlanError, match="layout='2-2' asks for 4 ranks, the trainer has 3"):
        propose(asked, "auto")
    with pytest.raises(ConfigError, match="planner='dapple' decides the layout"):
        propose(asked, "dapple")
    with pytest.raises(ConfigError, match=r"found planner='dappel'; did you mean 'dapple'"):
        propose(asked, "dappel")


def test_the_same_problem_gives_the_same_plan():
    problem = random_problem(7, SMALL)
    assert propose(problem, "auto")[0].plan == propose(problem, "auto")[0].plan


def test_of_many_devices_only_the_outlines_themselves_are_swept():
    """There are no groupings to combine all cuts with; forming these alone once took all memory of the machine."""
    graph, profile = layers([1.0] * 60, [8.0] * 60)
    asked = Problem(graph, profile, cluster(8), 16)
    outline = Candidate((15, 30, 45), ((0, 1), (2, 3), (4, 5), (6, 7)), 2, (2, 2, 2, 1))
    near = Neighborhood(asked, Parts(asked, Judge(asked).pricer))
    assert [ring.plans for ring in near.sweep([outline])] == [((outline.cuts, outline.ranks),)]


@pytest.mark.parametrize("planner", PLANNER_NAMES)
@pytest.mark.parametrize(("microbatches", "samples"), [(4, 2), (4, 3), (8, 6), (2, 1), (64, 8)])
def test_more_micro_batches_than_samples_are_refused_by_every_planner(planner, microbatches, samples):
    """Where they are a few more only, bounds of plans once ended in an IndexError."""
    graph, profile = layers([1] * 6, [8] * 6)
    layouts = (None, (1, 1)) if planner in FOLLOW_LAYOUTS else (None,)
    for layout, schedule in itertools.product(layouts, (None, "gpipe", "zb_h1")):
        constraints = Constraints(microbatches, layout, schedule)
        expected = f"A batch has {samples} samples, too few for {microbatches} micro-batches. Set .* at most {samples}"
        with pytest.raises(PlanError, match=expected):
            propose(Problem(graph, profile, cluster(2), samples, constraints=constraints), planner)


def test_a_layout_with_more_stages_than_operations_is_refused_with_the_numbers():
    graph, profile = layers([1] * 2, [8] * 2)
    asked = Problem(graph, profile, cluster(3), 16, constraints=Constraints(replicas=(1, 1, 1)))
    with pytest.raises(PlanError, match=r"2 operations and can be cut at 1 place .*, too few for 3 stages"):
        propose(asked, "auto")
