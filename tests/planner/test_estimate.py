"""What estimates must say: what the simulator says of plain pipelines, and nearly that of replicated ones."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from lightning_pipe.core.cluster import Link
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.candidates.cut_points import cuttable
from lightning_pipe.planner.estimates.recurrence import (
    Estimator,
    PipelineTimes,
    backward_ends,
    bound_s,
    microbatch_counts,
    row_s,
)
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge
from lightning_pipe.planner.problem import Constraints, Problem
from planner.test_uniform import cluster, layers

# forward, backward, reductions of compute, link, compute, ...; micro-batches; seconds of "pa" and of "pb": simulated
VECTORS = [
    ((4, 1, 4), (8, 1, 8), (0, 0), 4, 64, 62),
    ((4, 1, 4), (8, 1, 8), (30, 6), 4, 94, 92),
    ((3, 0.5, 5, 0.5, 2), (6, 0.5, 10, 0.5, 4), (0, 0, 0), 8, 132, 130),
    ((3, 0.5, 5, 0.5, 2), (6, 0.5, 10, 0.5, 4), (9, 3, 60), 8, 172, 160),
    ((1, 2, 1, 2, 1, 2, 1), (2, 2, 2, 2, 2, 2, 2), (0, 0, 0, 0), 8, 65, 48),
    ((6, 1, 2, 1, 2, 1, 2), (12, 1, 4, 1, 4, 1, 4), (5, 0, 0, 0), 6, 119, 115),
]


@pytest.mark.parametrize(("forward", "backward", "finish", "microbatches", "pa", "pb"), VECTORS)
def test_a_row_takes_what_an_event_simulation_says(forward, backward, finish, microbatches, pa, pb):
    stages = len(finish)
    row = PipelineTimes(forward[::2], backward[::2], forward[1::2], backward[1::2], finish, late=(0,) * stages)
    assert row_s(row, depths=[stages - s for s in range(stages)], microbatches=microbatches) == pa
    assert row_s(row, depths=[2 * (stages - s) - 1 for s in range(stages)], microbatches=microbatches) == pb


def order(depth, microbatches):
    """Return the computes of a stage: warm-up forwards, then one backward and one forward in turn."""
    computes = [("F", m) for m in range(min(depth, microbatches))]
    for m in range(microbatches):
        computes += [("B", m)] + ([("F", m + depth)] if m + depth < microbatches else [])
    return computes


def recursive_ends(row, depths, microbatches):
    """Return when each stage ends its last backward: what each compute and message waits for, looked up on demand."""
    last = len(depths) - 1
    before = {}
    for s, depth in enumerate(depths):
        computes = order(depth, microbatches)
        before.update({(s, *compute): (s, *earlier) for earlier, compute in itertools.pairwise(computes)})

    @functools.cache
    def end(s, kind, m):
        idle = end(*before[s, kind, m]) if (s, kind, m) in before else 0.0
        if kind == "F":
            return max(idle, sent_ahead(s - 1, m) if s else 0.0) + row.forward[s]
        return max(idle, sent_back(s + 1, m) if s < last else 0.0) + row.backward[s]

    @functools.cache
    def sent_ahead(s, m):
        return max(sent_ahead(s, m - 1) if m else 0.0, end(s, "F", m)) + row.ahead[s]

    @functools.cache
    def sent_back(s, m):
        return max(sent_back(s, m - 1) if m else 0.0, end(s, "B", m) - row.late[s]) + row.back[s - 1]

    return [end(s, "B", microbatches - 1) for s in range(last + 1)]


@pytest.mark.parametrize("seed", range(20))
def test_a_row_ends_when_its_recursion_says_whatever_depths_that_never_grow(seed):
    draw = random.Random(seed)
    stages, microbatches = draw.randint(1, 6), draw.randint(1, 12)
    depths = sorted((draw.randint(1, microbatches) for _ in range(stages)), reverse=True)
    forward, backward, ahead, back = ([draw.uniform(0.1, 2.0) for _ in range(stages)] for _ in range(4))
    late = tuple(draw.uniform(0.0, seconds) for seconds in backward)
    row = PipelineTimes(*map(tuple, (forward, backward, ahead[1:], back[1:])), finish=(0.0,) * stages, late=late)
    assert backward_ends(row, depths=depths, microbatches=microbatches) == recursive_ends(row, depths, microbatches)


@pytest.mark.parametrize("seed", range(20))
def test_no_depths_are_quicker_than_the_bound_of_a_row(seed):
    draw = random.Random(seed)
    stages, microbatches = draw.randint(1, 5), draw.randint(1, 6)
    times = [tuple(draw.uniform(0.1, 2.0) for _ in range(stages)) for _ in range(5)]
    forward, backward, ahead, back, finish = times
    late = tuple(draw.uniform(0.0, seconds) for seconds in backward)
    row = PipelineTimes(forward, backward, ahead[1:], back[1:], finish, late, step=1.0)
    for depths in itertools.combinations_with_replacement(range(microbatches, 0, -1), stages):
        seconds = row_s(row, depths=depths, microbatches=microbatches)
        assert seconds >= bound_s(row, microbatches=microbatches) - 1e-9, depths


def chain(seed: int) -> Problem:
    draw = random.Random(seed)
    seconds = [draw.uniform(0.5, 2.0) for _ in range(8)]
    graph, profile = layers(seconds, [draw.choice((8, 80, 800)) for _ in seconds])
    return Problem(graph, profile, cluster(4, link=Link(0.1, 2000.0)), 16)


@pytest.mark.parametrize("seed", range(8))
def test_a_pipeline_is_estimated_as_it_is_simulated(seed):
    problem, draw = chain(seed), random.Random(seed)
    estimator = Estimator(StageCostTable(problem, cuttable(problem.graph, sliced=True)))
    cuts = tuple(sorted(draw.sample(range(1, 8), k=3)))
    outline, seconds, _ = estimator.outline(cuts, ((0,), (1,), (2,), (3,)), draw.choice((4, 8)))
    judged = Judge(problem).judge(outline.plan(problem))
    assert seconds == pytest.approx(judged.step_s, rel=0.02)


@pytest.mark.parametrize("ranks", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1, 2), (3,)), ((0, 1, 2, 3),)])
def test_replicated_stages_are_estimated_well_enough_to_be_ranked(ranks):
    problem = chain(3)
    estimator = Estimator(StageCostTable(problem, cuttable(problem.graph, sliced=True)))
    cuts = (3, 6)[: len(ranks) - 1]
    outline, seconds, _ = estimator.outline(cuts, ranks, 4)
    judged = Judge(problem).judge(outline.plan(problem))
    assert seconds == pytest.approx(judged.step_s, rel=0.25)


def test_memory_lowers_depths():
    problem = chain(2)
    estimator = Estimator(StageCostTable(problem, cuttable(problem.graph, sliced=True)))
    layout = ((7,), ((0, 1), (2, 3)), 8)
    free, _, excess = estimator.outline(*layout)
    assert (free.depths[0] > 1, excess < 0) == (True, True)
    room = estimator.rooms(*layout)[0]
    need = (1 << 40) - room.bytes + 1.5 * room.saved
    tight = Problem(problem.graph, problem.profile, cluster(4, memory=round(need)), 16)
    bound, _, excess = Estimator(StageCostTable(tight, cuttable(tight.graph, sliced=True))).outline(*layout)
    assert (bound.depths, excess <= 0) == ((1, 1), True)


def test_recompute_keeps_depths_for_time():
    problem = chain(2)
    layout = ((7,), ((0, 1), (2, 3)), 8)
    estimator = Estimator(StageCostTable(problem, cuttable(problem.graph, sliced=True)))
    _, free_s, _ = estimator.outline(*layout)
    room = estimator.rooms(*layout)[0]
    memory = int((1 << 40) - room.bytes + 1.5 * room.saved)
    constraints = Constraints(memory_policies=frozenset({"recompute"}))
    tight = Problem(problem.graph, problem.profile, cluster(4, memory=memory), 16, constraints=constraints)
    _, seconds, excess = Estimator(StageCostTable(tight, cuttable(tight.graph, sliced=True))).outline(*layout)
    assert excess <= 0
    assert free_s < seconds


def test_micro_batches_give_every_replica_its_least_samples():
    problem = chain(1)
    assert microbatch_counts(problem, stages=2, replicas=4)[-1] == 16 // 4
    assert Candidate((4,), ((0,), (1,)), 4, (2, 1)).plan(problem).options == {"warmup": "pa"}
