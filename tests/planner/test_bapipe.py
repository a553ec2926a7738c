"""What exploring must find: the least of all it declares to explore, with warm-up that suits links and memory."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from lightning_pipe.core.cluster import Link
from lightning_pipe.planner.candidates.cut_points import cuttable
from lightning_pipe.planner.estimates.recurrence import Estimator
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.systems.bapipe import bapipe, candidates
from planner.test_uniform import FAST, cluster, layers

SLOW = Link(0.0, 700.0)


def asked(seed: int, *, nodes: int = 9, ranks: int = 4, link: Link = FAST, memory: int = 1 << 40) -> Problem:
    draw = random.Random(seed)
    seconds = [draw.uniform(0.5, 2.0) for _ in range(nodes)]
    graph, profile = layers(seconds, [draw.choice((8, 80, 800)) for _ in seconds])
    return Problem(graph, profile, cluster(ranks, link=link, memory=memory), 16)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("link", [FAST, SLOW])
def test_the_first_are_the_least_of_all_candidates(seed, link):
    problem = asked(seed, link=link)
    seconds = {outline: seconds for _, seconds, outline in candidates(problem)}
    found = bapipe(problem)
    estimator = Estimator(StageCostTable(problem, cuttable(problem.graph, sliced=False)))
    assert [estimator.step_s(outline) for outline in found] == pytest.approx(sorted(seconds.values())[: len(found)])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("link", [FAST, SLOW])
def test_cuts_are_near_the_best_of_all_cuts(seed, link):
    problem = asked(seed, link=link)
    estimator = Estimator(StageCostTable(problem, cuttable(problem.graph, sliced=False)))
    straight = ((0,), (1,), (2,), (3,))
    every = itertools.combinations(range(1, 9), 3)
    best = min(estimator.outline(cuts, straight, 8)[1] for cuts in every)
    found = min(seconds for _, seconds, o in candidates(problem) if o.ranks == straight and o.microbatches == 8)
    assert found <= 1.1 * best


def test_slow_links_ask_for_more_warm_up():
    graph, profile = layers([1.0] * 8, [80.0] * 8)
    wished = Constraints(microbatches=16)

    def depths(link: Link) -> tuple[int, ...]:
        problem = Problem(graph, profile, cluster(4, link=link), 16, constraints=wished)
        return next(outline.depths for outline in bapipe(problem) if len(outline.ranks) == 4)

    assert sum(depths(Link(1.0, 1e12))) > sum(depths(FAST))


@pytest.mark.parametrize("seed", range(4))
def test_partitions_are_mended_until_they_fit(seed):
    free = asked(seed)
    wished = replace(free, constraints=Constraints(microbatches=8))
    judge = Judge(wished)
    straight = [outline for outline in bapipe(wished) if len(outline.ranks) == 4]
    least = min(max(judge.judge(outline.plan(wished)).peak_bytes) for outline in straight)
    tight = replace(wished, cluster=cluster(4, memory=int(0.9 * least)))
    estimator = Estimator(StageCostTable(tight, cuttable(tight.graph, sliced=False)))
    every = [estimator.outline(cuts, ((0,), (1,), (2,), (3,)), 8)[2] for cuts in itertools.combinations(range(1, 9), 3)]
    found = [excess for excess, _, outline in candidates(tight) if len(outline.ranks) == 4]
    assert (min(found) <= 0) == (min(every) <= 0), (min(found), min(every))


def test_every_rank_is_used_once():
    for ranks in (1, 5, 6):
        for outline in bapipe(asked(0, ranks=ranks)):
            assert sorted(itertools.chain(*outline.ranks)) == list(range(ranks))
            assert len(outline.cuts) == len(outline.ranks) - 1


def test_a_graph_too_small_for_its_devices_gets_fewer_stages():
    outlines = bapipe(asked(0, nodes=2, ranks=6))
    assert outlines and all(len(outline.ranks) <= 2 for outline in outlines)
