"""Laws of calibration: costs that a run has shown predict that run, and better plans by them are better plans."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.planners.exhaustive import Size, random_problem
from lightning_pipe.core.cluster import Link, Reduction
from lightning_pipe.planner.comparison.calibration import calibrated
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged, judge
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.report import Comparison, RankPeak, compare
from planner.test_uniform import cluster, layers

KINDS = ("computes", "links", "sums", "optimizer")


def problem_of(seed: int) -> Problem:
    """Return a random problem whose messages and sums take as long as its computes."""
    problem = random_problem(seed, Size(layers=6, devices=3))
    ranks = problem.cluster.ranks
    whole = sum(problem.graph.parameter_bytes.values()) + 1
    rate = 40 * whole / sum(sum(of_one) for of_one in problem.profile.seconds)
    hosts = tuple(replace(host, inside=Link(1e-4, rate), network=Link(1e-4, rate)) for host in cluster(ranks).hosts)
    groups = [tuple(range(first, last)) for first in range(ranks) for last in range(first + 2, ranks + 1)]
    sums = tuple(Reduction(ranks, 1e-4, rate / 2) for ranks in groups)
    return replace(problem, cluster=replace(problem.cluster, hosts=hosts, links=(), reductions=sums))


def truth_of(problem: Problem, kinds: tuple[str, ...], *, seed: int) -> Problem:
    """Return what a problem is in truth: some kinds of its costs are others than was thought."""
    draw = random.Random(seed)
    profile, devices = problem.profile, problem.cluster
    if "computes" in kinds:
        halves = {"forward": draw.uniform(0.5, 3), "backward": draw.uniform(0.5, 3), "repeated": 1.0}
        factors = [halves[operation.phase] for operation in problem.graph.operations]
        seconds = zip(profile.seconds, factors, strict=True)
        profile = replace(profile, seconds=tuple(tuple(s * factor for s in of_one) for of_one, factor in seconds))
    if "optimizer" in kinds:
        optimizer, factor = profile.optimizer, draw.uniform(0.5, 3)
        profile = replace(profile, optimizer=replace(optimizer, fixed_s=optimizer.fixed_s * factor))
    if "links" in kinds:
        factor = draw.uniform(1.5, 6)
        inside = [Link(host.inside.latency_s * factor, host.inside.bytes_per_s / factor) for host in devices.hosts]
        hosts = (replace(host, inside=link) for host, link in zip(devices.hosts, inside, strict=True))
        devices = replace(devices, hosts=tuple(hosts))
    if "sums" in kinds:
        factor = draw.uniform(1.5, 6)
        found = (Reduction(r.ranks, r.latency_s * factor, r.bytes_per_s / factor) for r in devices.reductions)
        devices = replace(devices, reductions=tuple(found))
    return replace(problem, profile=profile, cluster=devices)


def ran(problem: Problem, truth: Problem, judged: Judged) -> Comparison:
    """Return the comparison of a plan's prediction with a run in which costs are what they are in truth."""
    measured = judge(judged.plan, truth).timeline
    return compare(judged.timeline, [measured], layout=judged.plan.layout)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kinds", [*((kind,) for kind in KINDS), KINDS], ids="+".join)
def test_calibrated_costs_predict_the_run_that_they_come_from(kinds, seed):
    problem = problem_of(seed)
    truth = truth_of(problem, kinds, seed=seed)
    for judged in propose(problem, "auto")[:3]:
        comparison = ran(problem, truth, judged)
        found = calibrated(problem, judged, comparison)
        assert judge(judged.plan, found).step_s == pytest.approx(comparison.step.measured, rel=0.03), judged.plan


def test_what_went_as_predicted_stays_as_it_is():
    for seed in range(6):
        problem = problem_of(seed)
        judged = propose(problem, "auto")[0]
        assert calibrated(problem, judged, ran(problem, problem, judged)) == problem


@pytest.mark.parametrize("seed", range(12))
def test_a_plan_that_is_better_by_calibrated_costs_is_better_in_truth(seed):
    """Where what was not seen in the run is as it was thought to be: links, while nothing is sent, and sums."""
    problem = problem_of(seed)
    first = propose(problem, "auto")[0]
    truth = truth_of(problem, ("computes",), seed=seed)
    second = propose(calibrated(problem, first, ran(problem, truth, first)), "auto")[0]
    assert judge(second.plan, truth).step_s <= judge(first.plan, truth).step_s * 1.03


def test_slow_sums_make_a_pipeline_of_replicas():
    graph, profile = layers([1.0] * 8, [4096] * 8)
    reductions = (Reduction((0, 1), 0.0, 40.0),)
    problem = Problem(graph, profile, replace(cluster(2), reductions=reductions), 16, constraints=Constraints())
    first = next(one for one in propose(problem, "auto") if one.plan.layout.stages == ((0, 1),))
    truth = replace(problem, cluster=replace(problem.cluster, reductions=(Reduction((0, 1), 0.0, 4.0),)))
    second = propose(calibrated(problem, first, ran(problem, truth, first)), "auto")[0]
    assert all(len(stage.ranks) == 1 for stage in second.plan.stages)
    assert judge(second.plan, truth).step_s < judge(first.plan, truth).step_s / 2


def test_devices_have_less_memory_where_more_was_taken_than_predicted():
    graph, profile = layers([1.0] * 4, [64] * 4)
    problem = Problem(graph, profile, cluster(2, memory=8000), 8)
    judged = Judge(problem).judge(propose(problem, "uniform")[0].plan)
    expected = [RankPeak(100, 200), RankPeak(100, 100)]
    found = [RankPeak(100, 250), RankPeak(100, 90)]
    comparison = compare(
        judged.timeline,
        [judged.timeline],
        layout=judged.plan.layout,
        predicted_memory=expected,
        measured_memory=found,
    )
    limited = calibrated(problem, judged, comparison).cluster
    assert [limited.device(rank).memory_bytes for rank in range(2)] == [6400, 6400]


def test_links_of_a_plan_that_sends_nothing_go_by_its_sums_and_sums_by_links():
    """Both go over the same wires, of which one kind has been seen."""
    graph, profile = layers([1.0] * 8, [64] * 8)
    link, sums = Link(0.0, 200.0), (Reduction((0, 1), 0.0, 40.0),)
    problem = Problem(graph, profile, replace(cluster(2, link=link), reductions=sums), 16)
    truth = replace(
        problem,
        cluster=replace(cluster(2, link=Link(0.0, 20.0)), reductions=(Reduction((0, 1), 0.0, 4.0),)),
    )
    for layout in ((2,), (1, 1)):
        first = propose(replace(problem, constraints=Constraints(2, layout)), "uniform")[0]
        found = calibrated(problem, first, ran(problem, truth, first)).cluster
        assert found.link(0, 1).bytes_per_s == pytest.approx(20.0, rel=0.1), layout
        assert found.reductions[0].bytes_per_s == pytest.approx(4.0, rel=0.1), layout
