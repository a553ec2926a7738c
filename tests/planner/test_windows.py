"""What holds where cuts are moved between the positions that tables have: every measurement of a long model has a plan.

A table has at most 400 positions; a GPT of 24 layers has some 570. Its refinement moved cuts to the positions between,
and then asked the table for them: the strategy died of `KeyError` or not as the measured times happened to be.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch

from benchmarks.models import GPT
from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.core.cluster import Cluster, Link
from lightning_pipe.core.graph import Graph
from lightning_pipe.cost.counted import counted
from lightning_pipe.planner.candidates.candidate import can_meet
from lightning_pipe.planner.candidates.cut_points import around, cuttable, worthwhile
from lightning_pipe.planner.candidates.moves import Ranks
from lightning_pipe.planner.estimates.cut_windows import CutWindows
from lightning_pipe.planner.estimates.recurrence import Estimator
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.portfolio import auto as search
from lightning_pipe.planner.problem import Constraints, Problem, nominal_cluster
from lightning_pipe.planner.registry import propose
from lightning_pipe.planner.systems.uniform import uniform
from planner.test_uniform import cluster, layers

SAMPLES = 16
SPREAD = 0.3  # of the logarithms of measured times
TIMES_OF_COUNTED = 20.0  # so that computes weigh as much as calls, in modules as narrow as these
SLOW = pytest.mark.slow


@functools.cache
def gpt(depth: int) -> Graph:
    """Capture a narrow GPT, some 23 positions a layer."""
    torch.manual_seed(0)
    _, structure = flatten([torch.randint(16, (SAMPLES, 9))])
    module = GPT(vocabulary=16, context=8, width=8, depth=depth)
    return capture_step(Request(module, "training_step", structure, samples=2)).graph


def measured(depth: int, devices: int, seed: int, constraints: Constraints) -> Problem:
    """Return a problem whose times differ from seed to seed as measured ones do."""
    graph, draw = gpt(depth), random.Random(seed)
    profile = counted(graph)
    seconds = tuple(
        tuple(s * TIMES_OF_COUNTED * factor for s in row)
        for row, factor in ((row, draw.lognormvariate(0.0, SPREAD)) for row in profile.seconds)
    )
    return Problem(graph, replace(profile, seconds=seconds), nominal_cluster(devices), SAMPLES, constraints=constraints)


def chain(length: int, devices: int, seed: int) -> Problem:
    """Return a chain of unequal layers, whose gradients are too large for replicas to be of use."""
    draw = random.Random(seed)
    seconds = [draw.uniform(1e-5, 1e-4) for _ in range(length)]
    graph, profile = layers(seconds, [draw.choice((1e3, 1e4, 1e5)) for _ in seconds], samples=SAMPLES)
    graph = replace(graph, parameter_bytes=dict.fromkeys(graph.parameter_bytes, 20_000_000))
    return Problem(graph, profile, cluster(devices, link=Link(5e-6, 1e10)), SAMPLES)


def scattered(problem: Problem, seed: int) -> tuple[int, ...]:
    """Return cuts between fine positions, where there are such; one stage per device."""
    fine = worthwhile(problem, sliced=True)
    positions = sorted({*cuttable(problem.graph, sliced=True)} - {*fine}) or fine
    return tuple(sorted(random.Random(seed).sample(positions, problem.cluster.ranks - 1)))


def numbers(estimator: Estimator, cuts: tuple[int, ...], ranks: Ranks) -> list[float]:
    """Return the times of a pipeline and the memory of its stages."""
    row = estimator.row(cuts, ranks, 4)
    rooms = [(room.bytes, room.spare, room.saved, room.arriving) for room in estimator.rooms(cuts, ranks, 4)]
    times = (row.forward, row.backward, row.ahead, row.back, row.finish, row.late, (row.step,))
    return [number for some in (*times, *rooms) for number in some]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("length", "devices"), [(500, 2), (600, 4)])
def test_cuts_at_any_positions_are_estimated_as_by_a_table_of_all(length: int, devices: int, seed: int) -> None:
    problem = chain(length, devices, seed)
    windows = CutWindows(problem, worthwhile(problem, sliced=True))
    cuts, ranks = scattered(problem, seed), tuple((rank,) for rank in range(devices))
    assert not windows.fine.knows(cuts)
    everywhere = Estimator(StageCostTable(problem, cuttable(problem.graph, sliced=True)))
    found, expected = (numbers(estimator, cuts, ranks) for estimator in (windows.around(cuts), everywhere))
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_window_serves_until_a_cut_leaves_it() -> None:
    problem = chain(500, 2, 0)
    windows = CutWindows(problem, worthwhile(problem, sliced=True, most=10))
    known = {int(position) for position in windows.fine.segments.bounds}
    between = [position for position in cuttable(problem.graph, sliced=True) if position not in known]
    first = windows.around((between[200],))
    assert windows.around((between[201],)) is first
    assert windows.around((between[0],)) is not first
    assert windows.around((sorted(known)[1],)) is windows.fine


def test_the_positions_around_cuts_are_as_many_as_wanted_and_have_the_cuts() -> None:
    positions = list(range(0, 100, 2))
    assert around(positions, (50,), most=4) == [46, 48, 50, 52, 54]
    assert around(positions, (0, 50), most=4) == [0, 2, 48, 50, 52]
    assert around(positions, (0, 50, 98), most=1) == [0, 2, 48, 50, 52, 96, 98]
    assert around(positions, (), most=4) == []


def shorten(monkeypatch: pytest.MonkeyPatch, *, judged: int) -> None:
    """Let a search spend less, and so come to its moves sooner."""
    monkeypatch.setattr(search, "_ESTIMATED", 20_000)
    monkeypatch.setattr(search, "_JUDGED", judged)


def neighbours_of(problem: Problem, outline: search.Candidate) -> list[search.Candidate]:
    """Return what the refinement tries around an outline that it has come to."""
    return list(search._Search(problem, ())._neighbours(outline))


def check_goes_on(problem: Problem, seed: int) -> None:
    """Check that neighbours of cuts at any positions differ by single positions, and in what has to be estimated."""
    devices = problem.cluster.ranks
    straight = tuple((rank,) for rank in range(devices))
    outline = search.Candidate(scattered(problem, seed), straight, 4, tuple(range(devices, 0, -1)))
    found = neighbours_of(problem, outline)
    moved = {cut for one in found for cut in one.cuts}
    assert moved & {cut + step for cut in outline.cuts for step in (-1, 1)}
    assert len({one.microbatches for one in found}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("depth", [24, pytest.param(48, marks=SLOW), pytest.param(96, marks=SLOW)])
def test_the_refinement_goes_on_from_cuts_at_any_positions(depth: int, devices: int) -> None:
    for seed in range(2):
        check_goes_on(measured(depth, devices, seed, Constraints()), seed)


@pytest.mark.parametrize(("length", "devices"), [(500, 2), (3000, 8)])
def test_the_refinement_of_a_long_chain_goes_on_from_cuts_at_any_positions(length: int, devices: int) -> None:
    check_goes_on(chain(length, devices, 0), 0)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("depth", "seeds"),
    [(24, 2), pytest.param(12, 4, marks=SLOW), pytest.param(48, 4, marks=SLOW), pytest.param(96, 2, marks=SLOW)],
)
def test_whatever_was_measured_of_a_long_model_there_is_a_plan(
    depth: int, seeds: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, judged=1_500 * devices)
    for seed in range(seeds):
        constraints = Constraints(replicas=(1,) * devices if seed % 2 == 0 else None, microbatches=4)
        best = search.auto(measured(depth, devices, seed, constraints), {"uniform": uniform})[0]
        assert best.step_s > 0, (depth, devices, seed)


@pytest.mark.parametrize(("length", "devices"), [(500, 2), pytest.param(3000, 8, marks=SLOW)])
def test_chains_of_more_layers_than_a_table_has_positions_have_plans(
    length: int, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, judged=10_000 * devices)
    best = propose(chain(length, devices, 0), "auto")[0]
    assert len(best.plan.stages) > 1


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("seed", [0, 1, 3, 5, 6, 9])
def test_stages_that_share_samples_differently_never_meet_where_nothing_can_be_sliced(seed: int) -> None:
    """Planners of equal groups cut there, and the search moved on from their cuts with other numbers of replicas.

    Seed 9: a schedule that cannot run where replicas take whole micro-batches ended the planning.
    """
    draw = random.Random(seed)
    graph, profile = layers([draw.uniform(1, 2) for _ in range(8)], [8.0] * 8)
    unsliceable = frozenset(k for k in range(1, 8) if draw.random() < 0.6)
    coupled = (graph.nodes[draw.randrange(8)].name,) if seed % 3 == 0 else ()
    graph = replace(graph, unsliceable=unsliceable, coupled=coupled)
    (host,) = cluster(4).hosts
    first, *others = host.devices
    mixed = replace(host, devices=(replace(first, speed=2.0), *others)) if seed % 2 else host
    problem = Problem(graph, profile, Cluster((mixed,)), SAMPLES)
    for planner in ("auto", "uniform", "dapple", "dawnpiper", "bapipe", "madpipe", "spp", "pipedream"):
        for one in propose(problem, planner):
            assert can_meet(problem, one.cuts, one.plan.layout.stages), (planner, one.plan)
