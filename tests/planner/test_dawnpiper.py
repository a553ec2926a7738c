"""What halving between balance of time and of memory must find: the best cuts of small graphs, good ones of large."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planners import memory
from lightning_pipe.core.cluster import Link
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import Profile
from lightning_pipe.planner.candidates.cut_points import cuttable
from lightning_pipe.planner.estimates.recurrence import Estimator
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge
from lightning_pipe.planner.memory.fit_memory import fit_by_policies
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.systems.dawnpiper import StageTimes, dawnpiper, interval, partition
from planner.test_activations import blocks
from planner.test_uniform import cluster, layers

RECOMPUTE = Constraints(memory_policies=frozenset({"recompute"}))


def test_the_best_cut_lies_between_balance_of_time_and_of_memory():
    draw = np.random.default_rng(0)
    for case in range(2000):
        size = int(draw.integers(3, 40))
        seconds, saved = draw.exponential(size=size), draw.exponential(size=size)
        first, second = sorted(draw.integers(1, 6, size=2))[::-1]  # micro-batches in flight fall
        before, behind = np.cumsum(seconds)[:-1], np.cumsum(seconds[::-1])[-2::-1]
        kept, held = first * np.cumsum(saved)[:-1], second * np.cumsum(saved[::-1])[-2::-1]
        memory, price = draw.uniform(0, kept[-1]), draw.exponential()

        def squeezed(times, held, memory=memory, price=price):
            return times + price * np.maximum(0.0, held - memory)

        slowest = np.maximum(squeezed(before, kept), squeezed(behind, held))
        low, high = interval(before - behind, kept - held)
        assert slowest[low : high + 1].min() == pytest.approx(slowest.min()), case


def chain(
    seed: int, *, nodes: int, stages: int, memory: int = 1 << 40, constraints: Constraints = RECOMPUTE
) -> Problem:
    draw = random.Random(seed)
    seconds = [draw.uniform(0.2, 2.0) for _ in range(nodes)]
    graph, profile = layers(seconds, [draw.choice((8, 80, 800)) for _ in seconds])
    return Problem(graph, profile, cluster(stages, memory=memory), 16, constraints=constraints)


def slowest(problem: Problem, model: StageTimes, cuts: tuple[int, ...]) -> float:
    ends = itertools.pairwise((0, *cuts, len(problem.graph.nodes)))  # every node is a unit
    return max(float(model.seconds(s, a, b)) for s, (a, b) in enumerate(ends))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("part", [None, 0.9, 0.6, 0.3])
def test_halving_finds_the_best_of_all_cuts_of_small_graphs(stages, part):
    for seed in range(8):
        problem = chain(seed, nodes=10, stages=stages)
        if part is not None:
            fullest = max(Judge(problem).judge(dawnpiper(problem)[0].plan(problem)).peak_bytes)
            problem = replace(problem, cluster=cluster(stages, memory=int(part * fullest)))
        estimator = Estimator(StageCostTable(problem, cuttable(problem.graph, sliced=False)))
        groups = tuple((rank,) for rank in range(stages))
        model = StageTimes(estimator, groups, 8)
        chosen, most = partition(estimator, groups, 8)
        model.limit(most)
        best = min(slowest(problem, model, cuts) for cuts in itertools.combinations(range(1, 10), stages - 1))
        found = slowest(problem, model, chosen)
        assert found == pytest.approx(best), (seed, found, best)


@pytest.mark.parametrize("stages", [8, 13])
def test_halving_is_near_the_best_balance_of_many_stages(stages):
    for seed in range(3):
        problem = chain(seed, nodes=60, stages=stages)
        estimator = Estimator(StageCostTable(problem, cuttable(problem.graph, sliced=False)))
        groups = tuple((rank,) for rank in range(stages))
        model = StageTimes(estimator, groups, 8)
        found = slowest(problem, model, partition(estimator, groups, 8)[0])
        assert found <= 1.05 * best_balance(model, 60, stages), seed


def best_balance(model: StageTimes, units: int, stages: int) -> float:
    """Return the least largest time by dynamic programming; memory is no matter."""
    bounds = np.arange(units + 1)
    best = np.array([0.0, *model.seconds(0, 0, bounds[1:])])
    for s in range(1, stages):
        best = np.array(
            [np.inf, *(min(np.maximum(best[:b], model.seconds(s, bounds[:b], b))) for b in range(1, units + 1))]
        )
    return float(best[-1])


def test_less_memory_moves_work_to_stages_that_hold_fewer_micro_batches():
    graph, profile = blocks(40)
    free = Problem(graph, profile, cluster(4), 16, constraints=replace(RECOMPUTE, microbatches=16))
    judge = Judge(free)
    straight = next(o for o in dawnpiper(free) if len(o.ranks) == 4)
    peak = judge.judge(straight.plan(free)).peak_bytes[0]
    tight = replace(free, cluster=cluster(4, memory=int(0.5 * peak)))
    squeezed = next(o for o in dawnpiper(tight) if len(o.ranks) == 4)
    assert squeezed.cuts[0] <= straight.cuts[0]
    assert squeezed.cuts[-1] < straight.cuts[-1]  # the last stage, which recomputes least, gets more


@pytest.mark.parametrize("part", [0.5, 0.7])
def test_every_stage_fits_by_its_policies_where_without_none_does(part):
    graph, profile = blocks(16)
    free = Problem(graph, profile, cluster(4), 16, constraints=replace(RECOMPUTE, microbatches=16))
    straight = next(o for o in dawnpiper(free) if len(o.ranks) == 4)
    memory = int(part * Judge(free).judge(straight.plan(free)).peak_bytes[0])
    tight = replace(free, cluster=cluster(4, memory=memory))
    outline = next(o for o in dawnpiper(tight) if len(o.ranks) == 4)
    judge = Judge(tight)
    judged = judge.judge(outline.plan(tight))
    assert judged.overflow(tight.cluster) > 0
    assert fit_by_policies(tight, judged, judge=judge).overflow(tight.cluster) <= 0


def test_groups_divide_the_devices():
    graph, profile = layers([1.0] * 12, [8.0] * 12)
    problem = Problem(graph, profile, cluster(6, link=Link(0.0, 1e12)), 48)
    outlines = dawnpiper(problem)
    assert len(outlines) <= 8
    for outline in outlines:
        sizes = {len(group) for group in outline.ranks}
        assert len(sizes) == 1 and sorted(itertools.chain(*outline.ranks)) == list(range(6))


def test_a_graph_too_small_for_its_devices_gets_fewer_stages():
    graph, profile = layers([1.0, 1.0], [8.0, 8.0])
    problem = Problem(graph, profile, cluster(6), 2)
    outlines = dawnpiper(problem)
    assert outlines and all(len(outline.ranks) <= 2 for outline in outlines)


def big(nodes: int) -> tuple[Graph, Profile]:
    draw = random.Random(1)
    return layers([draw.uniform(0.5, 2.0) for _ in range(nodes)], [8.0] * nodes, samples=512)


def test_many_nodes_on_many_devices_are_planned():
    graph, profile = big(200)
    problem = Problem(graph, profile, cluster(32), 512)
    assert len(dawnpiper(problem)[0].ranks) >= 1


@pytest.mark.skipif(not memory.PROFILE.exists(), reason="the published profile is not beside the repository")
def test_large_published_layers_fit_by_recompute_that_falls_along_the_pipeline():
    asked = replace(memory.problem(4, 8, "recompute"), samples=10)
    outline = next(outline for outline in dawnpiper(asked) if len(outline.ranks) == 8)
    judge = Judge(asked)
    kept = judge.judge(replace(outline, depths=tuple(range(8, 0, -1))).plan(asked))
    found = fit_by_policies(asked, kept, judge=judge)
    assert kept.overflow(asked.cluster) > 10e9
    assert found.overflow(asked.cluster) <= 0
    shares = [*memory.shares(asked, found)]
    assert shares[0] > 0.9 > shares[-1] and memory.is_falling(shares), shares
