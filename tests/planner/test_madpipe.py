"""What MadPipe's planner promises: the least period within memory, depths that sustain it, and published ratios."""

from __future__ import annotations

import itertools
import math
import random
import sys
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planners.madpipe import EXPECTED, GIGABYTES, MODELS, PROFILES, chain, ratio
from lightning_pipe.core.cluster import Cluster, Link, PairLink
from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.planner.candidates.cut_points import cuttable
from lightning_pipe.planner.estimates.recurrence import Estimator, PipelineTimes, backward_ends
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.systems.madpipe.madpipe_chain import Chain, Processor, chain_of
from lightning_pipe.planner.systems.madpipe.madpipe_contiguous import (
    best_pipeline,
    least_exceeding,
    stretched,
    sustained,
)
from lightning_pipe.planner.systems.madpipe.madpipe_periodic import Periodic, least_periodic, operations_of
from lightning_pipe.planner.systems.madpipe.madpipe_planner import madpipe
from lightning_pipe.planner.systems.madpipe.madpipe_special import SPECIAL, Allocation, best_allocation
from lightning_pipe.schedule.orders.one_f_one_b import star_depths
from planner.test_uniform import cluster, layers

ENDLESS = 1 << 30  # micro-batches


def sums(units: list[float]) -> np.ndarray:
    """Return for every stage the sum over its units."""
    done = np.concatenate([[0.0], np.cumsum(units)])
    return np.triu(done[None, :] - done[:, None])


def row_of_processors(
    draw: random.Random, *, units: int, processors: int, memory: float, droppable: float = 0.0
) -> Chain:
    """Return a random chain of equal processors; a unit saves 2 on average, and weighs 1."""
    load = sums([draw.randint(1, 9) for _ in range(units)])
    saved, fixed = sums([draw.randint(1, 3) for _ in range(units)]), sums([1.0] * units)
    links = np.array([0.0, *(draw.choice((0.0, 1.0, 4.0)) for _ in range(units - 1)), 0.0])
    processor = Processor(load, load / 3, fixed, saved, droppable * saved, droppable / 2 * saved, memory)
    return Chain((processor,) * processors, (links,) * (processors - 1), ENDLESS)


def stages(chain: Chain, cuts) -> list[tuple[int, int]]:
    return [*itertools.pairwise((0, *cuts, chain.bounds - 1))]


def loads(chain: Chain, cuts, dropped) -> list[float]:
    """Return the loads of stages, with what they recompute."""
    placed = zip(chain.processors, stages(chain, cuts), dropped, strict=True)
    return [float(p.load_s[a, b] + share * p.forward_s[a, b]) for p, (a, b), share in placed]


def links(chain: Chain, cuts) -> list[float]:
    return [float(link[cut]) for link, cut in zip(chain.links, cuts, strict=True)]


def fits(chain: Chain, cuts, dropped, period: float) -> bool:
    """Return, by the schedule's own rule, whether stages that drop these shares sustain a period within memory."""
    times, messages = loads(chain, cuts, dropped), links(chain, cuts)
    if max(*times, *messages) > period:
        return False
    depths = star_depths(times, links=messages, period=period)
    placed = zip(chain.processors, stages(chain, cuts), depths, dropped, strict=True)
    return all(p.bytes(a, b, held=d, dropped=share) <= p.memory_bytes for p, (a, b), d, share in placed)


def brute_period(chain: Chain, cuts, dropped) -> float:
    """Return the least period of given stages, by bisection over the schedule's own rule."""
    low, high = 0.0, 1000.0
    if not fits(chain, cuts, dropped, high):
        return math.inf
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(chain, cuts, dropped, middle) else (middle, high)
    return high


def all_cuts(chain: Chain):
    return itertools.combinations(range(1, chain.bounds - 1), len(chain.processors) - 1)


@pytest.mark.parametrize("seed", range(12))
def test_no_cuts_have_a_shorter_period_within_memory(seed):
    draw = random.Random(seed)
    units, count = draw.randint(4, 8), draw.randint(2, 4)
    asked = row_of_processors(draw, units=units, processors=count, memory=draw.uniform(5, 14))
    best = min(brute_period(asked, cuts, (0.0,) * count) for cuts in all_cuts(asked))
    found = best_pipeline(asked)
    assert (found.period if found else math.inf) == pytest.approx(best, rel=1e-5)
    if found:
        assert found.excess(asked) <= 0
        assert found.groups == star_depths(
            loads(asked, found.cuts, found.dropped), links=links(asked, found.cuts), period=found.period
        )


@pytest.mark.parametrize("seed", range(6))
def test_no_shares_of_recompute_have_a_shorter_period_within_memory(seed):
    draw = random.Random(seed)
    asked = row_of_processors(draw, units=6, processors=3, memory=draw.uniform(6, 9), droppable=0.75)
    shares = itertools.product((0.0, 0.25, 0.5, 0.75, 1.0), repeat=3)
    tried = [
        brute_period(asked, cuts, dropped)
        for cuts, dropped in itertools.product(all_cuts(asked), shares)
        if fits(asked, cuts, dropped, 40.0)
    ]
    found = best_pipeline(asked)
    assert found is not None and found.period <= min(tried) * (1 + 1e-5)
    assert fits(asked.with_memory(1e-9, more=True), found.cuts, found.dropped, found.period)
    assert max(found.dropped) > 0 or found.period == pytest.approx(min(tried), rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_processors_may_differ(seed):
    draw = random.Random(seed)
    plain = row_of_processors(draw, units=6, processors=3, memory=0.0)
    different = tuple(
        replace(p, load_s=p.load_s / speed, memory_bytes=memory)
        for p, speed, memory in zip(plain.processors, (1, 2, 3), (9.0, 7.0, 14.0), strict=True)
    )
    asked = replace(plain, processors=different)
    best = min(brute_period(asked, cuts, (0.0,) * 3) for cuts in all_cuts(asked))
    found = best_pipeline(asked)
    assert (found.period if found else math.inf) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_the_depths_sustain_the_period(seed):
    draw = random.Random(seed)
    asked = row_of_processors(draw, units=8, processors=4, memory=draw.uniform(8, 14))
    found = best_pipeline(asked) or least_exceeding(asked)
    times, messages = loads(asked, found.cuts, found.dropped), links(asked, found.cuts)
    forward, half = [t / 3 for t in times], tuple(m / 2 for m in messages)
    row = PipelineTimes(
        tuple(forward), tuple(t - f for t, f in zip(times, forward, strict=True)), half, half, (0,) * 4, (0,) * 4
    )
    short, long = (max(backward_ends(row, depths=found.groups, microbatches=count)) for count in (40, 80))
    assert (long - short) / 40 <= found.period * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_stages_are_stretched_to_the_period_that_memory_allows(seed):
    draw = random.Random(seed)
    asked = row_of_processors(draw, units=8, processors=4, memory=draw.uniform(8, 14))
    found = stretched(asked, (2, 4, 6))
    assert (found.period if found else math.inf) == pytest.approx(brute_period(asked, (2, 4, 6), (0.0,) * 4), rel=1e-5)


def test_what_fits_nowhere_exceeds_memory_as_little_as_possible():
    asked = row_of_processors(random.Random(0), units=6, processors=3, memory=2.0)
    assert best_pipeline(asked) is None
    least = min(
        max(p.bytes(a, b, held=1) - 2.0 for p, (a, b) in zip(asked.processors, stages(asked, cuts), strict=True))
        for cuts in all_cuts(asked)
    )
    assert least_exceeding(asked).excess(asked) == pytest.approx(least)


def test_decided_depths_are_kept_to():
    asked = replace(row_of_processors(random.Random(1), units=8, processors=4, memory=99.0), depths=(2, 2, 1, 1))
    free = replace(asked, depths=None)
    found, better = best_pipeline(asked), best_pipeline(free)
    assert found.held == (2, 2, 1, 1) and all(g <= d for g, d in zip(found.groups, found.held, strict=True))
    assert found.period > better.period


# ---- periodic schedules ----------------------------------------------------------------------------------------------


def contiguous(chain: Chain, cuts) -> Allocation:
    return Allocation(tuple(cuts), tuple(range(len(chain.processors))), 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_no_schedule_of_contiguous_stages_has_a_shorter_period_than_the_depths(seed):
    draw = random.Random(seed)
    asked = row_of_processors(draw, units=8, processors=draw.choice((3, 4)), memory=draw.uniform(9, 13))
    found = best_pipeline(asked) or least_exceeding(asked)
    room = asked.with_memory(max(0.0, found.excess(asked)) + 1e-6, more=True)
    schedule = least_periodic(room, contiguous(room, found.cuts))
    assert schedule.period == pytest.approx(stretched(room, found.cuts).period, rel=1e-4)


def held_at(schedule: Periodic, stage: int, time: float) -> int:
    """Count the micro-batches that a stage holds at a time of a period, all earlier periods run."""
    count = 0
    for operation, start, shift in zip(schedule.operations, schedule.starts, schedule.shifts, strict=True):
        if operation.stage == stage and operation.kind in ("F", "B"):
            moment = start + (operation.seconds if operation.kind == "B" else 0.0)
            done = math.floor((time - moment) / schedule.period + 1e-5) - shift  # of micro-batches, up to a constant
            count += done if operation.kind == "F" else -done
    return count


@pytest.mark.parametrize("seed", range(3))
def test_a_periodic_schedule_can_run(seed):
    draw = random.Random(seed)
    asked = row_of_processors(draw, units=6, processors=2, memory=15.0)
    schedule = least_periodic(asked, Allocation((2, 4), (0, 1, 0), 0.0))
    period, parts = schedule.period, zip(schedule.operations, schedule.starts, schedule.shifts, strict=True)
    meets = [(o, start + period * shift) for o, start, shift in parts]
    for (one, start), (_, then) in itertools.pairwise(meets):
        assert then >= start + one.seconds - 1e-4
    for (one, start), (two, then) in itertools.combinations(meets, 2):
        if one.where == two.where and min(one.seconds, two.seconds) > 0:
            gap = (then - start) % period
            assert gap >= one.seconds - 1e-4 and period - gap >= two.seconds - 1e-4
    assert has_room(asked, Allocation((2, 4), (0, 1, 0), 0.0), schedule)


def brute_whole_period(chain: Chain, allocation: Allocation, *, busiest: int) -> int:
    """Return the least whole period of computes of whole seconds, messages free, by trying all whole starts."""
    computes = [replace(o, seconds=round(o.seconds)) for o in operations_of(chain, allocation) if o.kind in ("F", "B")]
    for period in itertools.count(busiest):
        for rest in itertools.product(range(period), repeat=len(computes) - 1):
            schedule = earliest(computes, (0, *rest), period)
            if takes_turns(schedule) and has_room(chain, allocation, schedule):
                return period


def earliest(operations, starts, period: int) -> Periodic:
    """Return the schedule in which every micro-batch goes on at the next start."""
    shifts = [0]
    for (one, start), (_, then) in itertools.pairwise(zip(operations, starts, strict=True)):
        shifts.append(shifts[-1] + math.ceil((start + one.seconds - then) / period))
    return Periodic(period, tuple(operations), tuple(starts), tuple(shifts))


def takes_turns(schedule: Periodic) -> bool:
    placed = zip(schedule.operations, schedule.starts, strict=True)
    for (one, start), (two, then) in itertools.combinations(placed, 2):
        gap = (then - start) % schedule.period
        if one.where == two.where and (gap < one.seconds or schedule.period - gap < two.seconds):
            return False
    return True


def has_room(chain: Chain, allocation: Allocation, schedule: Periodic) -> bool:
    p, bounds, owners = chain.processors[0], stages(chain, allocation.cuts), allocation.processors
    for operation, start in zip(schedule.operations, schedule.starts, strict=True):
        if operation.kind == "F":
            mine = (s for s, owner in enumerate(owners) if owner == operation.where)
            if sum(p.bytes(*bounds[s], held=held_at(schedule, s, start)) for s in mine) > p.memory_bytes + 1e-3:
                return False
    return True


@pytest.mark.parametrize(("middle", "memory", "period"), [(3, 5, 9), (3, 6, 7), (3, 8, 6), (6, 6, 9), (6, 8, 6)])
def test_no_schedule_of_stages_that_are_not_neighbours_has_a_shorter_period(middle, memory, period):
    load = sums([3.0, middle, 3.0])
    processor = Processor(load, load / 3, sums([1.0] * 3), sums([2.0, 3.0, 1.0]), 0 * load, 0 * load, memory)
    asked = Chain((processor,) * 2, (np.zeros(4),), ENDLESS)
    allocation = Allocation((1, 2), (SPECIAL, 1, SPECIAL), 0.0)
    found = least_periodic(asked, allocation)
    assert math.ceil(found.period - 1e-4) == brute_whole_period(asked, allocation, busiest=6) == period


def test_a_periodic_schedule_without_scipy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    asked = row_of_processors(random.Random(0), units=4, processors=2, memory=99.0)
    with pytest.raises(ConfigError, match=r"lightning-pipe\[planners\]"):
        least_periodic(asked, contiguous(asked, [2]))


def test_memory_that_no_schedule_fits_is_said():
    load = sums([3.0, 3.0])
    processor = Processor(load, load / 3, sums([1.0] * 2), sums([2.0] * 2), 0 * load, 0 * load, 2.0)
    assert least_periodic(Chain((processor,) * 2, (np.zeros(3),), ENDLESS), Allocation((1,), (0, 1), 0.0)) is None


@pytest.mark.parametrize("seed", range(4))
def test_a_special_processor_is_never_promised_a_longer_period(seed):
    draw = random.Random(seed)
    asked = row_of_processors(draw, units=7, processors=3, memory=draw.uniform(6, 10))
    found, straight = best_allocation(asked, steps=12), best_pipeline(asked)
    assert found is not None
    assert straight is None or found.period <= straight.period * 1.001
    owners = [owner for owner in found.processors if owner != SPECIAL]
    assert len(owners) == len(set(owners)) <= 2 and set(found.processors) <= {0, 1, 2}
    busy = sum(
        float(asked.processors[0].load_s[a, b])
        for (a, b), o in zip(stages(asked, found.cuts), found.processors, strict=True)
        if o == SPECIAL
    )
    assert busy <= found.period * (1 + 1e-6)


def test_a_special_processor_among_different_ones_is_refused():
    asked = row_of_processors(random.Random(0), units=4, processors=2, memory=9.0)
    other = replace(asked.processors[0], memory_bytes=5.0)
    with pytest.raises(PlanError, match="equal processors"):
        best_allocation(replace(asked, processors=(asked.processors[0], other)))


# ---- the planner -----------------------------------------------------------------------------------------------------


def problem(devices: Cluster, *, seed: int = 0, units: int = 12, samples: int = 32, **constraints) -> Problem:
    draw = random.Random(seed)
    seconds = [draw.uniform(0.5, 2.0) for _ in range(units)]
    graph, profile = layers(seconds, [draw.choice((80, 800)) for _ in seconds])
    return Problem(graph, profile, devices, samples, constraints=Constraints(**constraints))


def chain_for(asked: Problem, outline) -> tuple[Chain, Estimator]:
    estimator = Estimator(StageCostTable(asked, cuttable(asked.graph, sliced=len(outline.ranks[0]) > 1)))
    return chain_of(estimator, outline.ranks, outline.microbatches), estimator


@pytest.mark.parametrize("count", [1, 2, 4, 6, 8])
def test_every_rank_is_used_once_and_outlines_differ(count):
    asked = problem(cluster(count, link=Link(0.01, 1e5)))
    found = madpipe(asked)
    assert 1 <= len(found) == len(set(found)) <= 8
    assert found == madpipe(asked)
    for outline in found:
        assert sorted(rank for group in outline.ranks for rank in group) == list(range(count))
        assert len(outline.cuts) + 1 == len(outline.ranks) == len(outline.depths)
        assert list(outline.depths) == sorted(outline.depths, reverse=True)
        Judge(asked).judge(outline.plan(asked))


@pytest.mark.parametrize("policies", [frozenset(), frozenset({"recompute"})])
def test_no_stage_is_modelled_to_exceed_memory_while_any_pipeline_fits(policies):
    free = problem(cluster(4, link=Link(0.01, 1e5)))
    peak = max(Judge(free).judge(madpipe(free)[0].plan(free)).peak_bytes)
    asked = replace(
        free,
        cluster=cluster(4, link=Link(0.01, 1e5), memory=round(0.6 * peak)),
        constraints=Constraints(memory_policies=policies),
    )
    for outline in madpipe(asked):
        chain, estimator = chain_for(asked, outline)
        cuts = np.searchsorted(estimator.segments.bounds, outline.cuts).tolist()
        assert chain.fits(cuts, outline.depths)


def test_recompute_shortens_the_period_within_memory():
    groups, free = ((0,), (1,), (2,), (3,)), problem(cluster(4, link=Link(0.01, 1e5)), units=40, microbatches=8)
    chains = []
    for policies in (frozenset(), frozenset({"recompute"})):
        asked = replace(free, constraints=Constraints(8, memory_policies=policies))
        chains.append(chain_of(Estimator(StageCostTable(asked, cuttable(asked.graph, sliced=False))), groups, 8))
    without, recomputing = chains
    memory = 1.1 * least_exceeding(without.with_memory(0.0)).excess(without.with_memory(0.0))
    plain, better = best_pipeline(without.with_memory(memory)), best_pipeline(recomputing.with_memory(memory))
    assert max(better.dropped) > 0 and better.period < 0.9 * plain.period


def test_where_nothing_fits_the_least_bad_is_returned():
    asked = problem(cluster(4, memory=100))
    found = madpipe(asked)
    assert found and len(found[0].ranks) == 4


def test_wishes_are_kept_to():
    devices = cluster(4, link=Link(0.01, 1e5))
    assert {o.microbatches for o in madpipe(problem(devices, microbatches=8))} == {8}
    assert all(len(o.ranks[0]) <= 32 // (4 * 8) for o in madpipe(problem(devices, microbatches=4, least_samples=8)))
    for outline in madpipe(problem(devices, microbatches=8, warmup="2")):
        assert set(outline.depths) == {2}
    for outline in madpipe(problem(devices, microbatches=8, schedule="gpipe")):
        assert set(outline.depths) == {8}


def test_a_graph_of_one_node_is_one_stage_on_all_ranks():
    found = madpipe(problem(cluster(3), units=1))
    assert {o.ranks for o in found} == {((0, 1, 2),)}


def test_stages_follow_fast_links():
    slow, fast = Link(0.01, 1e4), Link(0.01, 1e7)
    pairs = (PairLink(a, b, fast) for a, b in itertools.permutations(range(4), 2) if (a - b) % 2 == 0)
    asked = problem(replace(cluster(4, link=slow), links=tuple(pairs)), microbatches=8)
    straight = [o.ranks for o in madpipe(asked) if len(o.ranks) == 4]
    assert straight and all({a % 2 for (a,) in ranks[:2]} != {b % 2 for (b,) in ranks[2:]} for ranks in straight)


def test_steps_without_backward_are_planned():
    asked = replace(problem(cluster(4, link=Link(0.01, 1e5))), training=False)
    for outline in madpipe(asked):
        Judge(asked).judge(outline.plan(asked))


def test_the_period_promised_is_that_of_the_depths():
    asked = problem(cluster(4, link=Link(0.01, 1e5)), microbatches=8)
    estimator = Estimator(StageCostTable(asked, cuttable(asked.graph, sliced=False)))
    chain = chain_of(estimator, ((0,), (1,), (2,), (3,)), 8)
    found = best_pipeline(chain)
    cuts = [int(estimator.segments.bounds[b]) for b in found.cuts]
    row = estimator.row(cuts, ((0,), (1,), (2,), (3,)), 8)
    assert row.loads() == pytest.approx(loads(chain, found.cuts, found.dropped))
    assert row.links() == pytest.approx(links(chain, found.cuts))
    assert sustained(chain, found.cuts, found.period * 0.99) is None


# ---- published profiles ----------------------------------------------------------------------------------------------

TABLE = [("resnet50", 4, 3), ("resnet50", 8, 4), ("inception_v3", 4, 6), ("inception_v3", 8, 3)]


@pytest.mark.skipif(not PROFILES.is_dir(), reason="published profiles are not beside the repository")
@pytest.mark.parametrize(("name", "processors", "gigabytes"), TABLE)
def test_ratios_to_the_blind_partition_are_those_of_the_table(name, processors, gigabytes):
    model = next(model for model in MODELS if model.name == name)
    expected = EXPECTED[name, processors][GIGABYTES.index(gigabytes)]
    assert ratio(chain(model, processors), gigabytes) == pytest.approx(expected, rel=0.02)
