"""What the DAPPLE planner promises: the paper's formula, plans no worse than its special cases, and its Table 4."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planners import dapple as table
from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.estimates.recurrence import PipelineTimes, row_s
from lightning_pipe.planner.evaluation.evaluate import Judge
from lightning_pipe.planner.memory.settle import settle
from lightning_pipe.planner.portfolio.exhaustive import exhaustive
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.systems.dapple.dapple_latency import (
    Element,
    ElementTimes,
    data_parallel_s,
    elements_of,
    empty_prefix,
    latency_s,
    pivot,
)
from lightning_pipe.planner.systems.dapple.dapple_planner import dapple, ranked
from lightning_pipe.planner.systems.uniform import uniform
from planner.test_uniform import cluster, layers

# forward, backward, reductions of compute, link, compute, ...; micro-batches; pivot; latency: worked out independently
VECTORS = [
    ((4, 1, 4), (8, 1, 8), (0, 0, 0), 4, 2, 62),
    ((4, 1, 4), (8, 1, 8), (30, 0, 6), 4, 2, 92),
    ((3, 0.5, 5, 0.5, 2), (6, 0.5, 10, 0.5, 4), (0,) * 5, 8, 2, 130),
    ((3, 0.5, 5, 0.5, 2), (6, 0.5, 10, 0.5, 4), (9, 0, 3, 0, 60), 8, 2, 159),
    ((1, 2, 1, 2, 1, 2, 1), (2, 2, 2, 2, 2, 2, 2), (0,) * 7, 8, 5, 49),
    ((6, 1, 2, 1, 2, 1, 2), (12, 1, 4, 1, 4, 1, 4), (5, 0, 0, 0, 0, 0, 0), 6, 0, 113),
]


def summarised_s(elements: list[Element], microbatches: int) -> float:
    prefix = empty_prefix(1)
    for e in elements:
        times = (np.array([float(x)]) for x in (e.forward, e.backward, e.reduce, 0.0))
        prefix = prefix.append(ElementTimes(*times), microbatches=microbatches)
    return float(prefix.latency_s(microbatches)[0])


@pytest.mark.parametrize(("forward", "backward", "reduce", "microbatches", "q", "seconds"), VECTORS)
def test_pivot_and_latency_by_hand(forward, backward, reduce, microbatches, q, seconds):
    elements = [Element(*times) for times in zip(forward, backward, reduce, strict=True)]
    assert (pivot(elements, microbatches), latency_s(elements, microbatches)) == (q, seconds)
    assert summarised_s(elements, microbatches) == pytest.approx(seconds)


def random_row(draw: random.Random) -> PipelineTimes:
    stages = draw.randint(2, 6)
    forward = tuple(draw.uniform(1, 3) for _ in range(stages))
    links = tuple(draw.uniform(0, 0.4) for _ in range(stages - 1))
    reduce = (draw.choice((0.0, draw.uniform(0, 20))), *(0.0,) * (stages - 1))  # none behind the pivot
    return PipelineTimes(forward, tuple(2 * f for f in forward), links, links, reduce, late=(0.0,) * stages)


def test_the_formula_is_never_above_the_simulation_if_a_stage_is_the_pivot():
    # With sums behind the pivot it can be: where warm-up is deep, the last backwards of the pivot follow each other,
    # and the stages behind it have ended long before.
    draw, checked = random.Random(5), 0
    for _ in range(300):
        row = random_row(draw)
        stages = len(row.forward)
        microbatches = draw.randint(stages, 4 * stages)
        elements = elements_of(row)
        if pivot(elements, microbatches) % 2:
            continue
        checked += 1
        simulated = row_s(row, depths=[2 * (stages - s) - 1 for s in range(stages)], microbatches=microbatches)
        assert latency_s(elements, microbatches) <= simulated * (1 + 1e-9), (row, microbatches)
    assert checked > 200


def test_the_summary_of_a_prefix_gives_the_formula_nearly_always():
    draw, differing = random.Random(7), 0
    for _ in range(300):
        elements, microbatches = elements_of(random_row(draw)), draw.randint(1, 20)
        exact = latency_s(elements, microbatches)
        differing += summarised_s(elements, microbatches) != pytest.approx(exact)
    assert differing <= 15


def test_sums_of_gradients_overlap_with_the_last_backward():
    # parts take 4, 2, 6 s backward and make 10, 1, 1 bytes: sums of 1, 1, 10 s begin at 6, 8 and 12
    assert data_parallel_s(3.0, [4.0, 2.0, 6.0], [10.0, 1.0, 1.0], lambda size: size, count=1) == 3 + 12 + 10
    assert data_parallel_s(3.0, [4.0, 2.0, 6.0], [1.0, 1.0, 1.0], lambda size: size, count=2) == 6 + 24 + 1
    # a sum that is still going on delays the next, which then takes all that is ready
    assert data_parallel_s(1.0, [1.0, 1.0, 1.0], [1.0, 1.0, 4.0], lambda size: size, count=1) == 1 + 1 + 4 + 2


def drawn(seed: int) -> Problem:
    draw = random.Random(seed)
    graph, profile = layers([draw.uniform(0.5, 2) for _ in range(4)], [draw.choice((8, 80, 800)) for _ in range(4)])
    fast, slow = Device("x", 1 << 40), Device("y", 1 << 40, speed=0.5)
    hosts = (Host("a", (fast,) * 2, Link(0, 4e3), Link(0.1, 300)), Host("b", (slow,) * 2, Link(0, 4e3), Link(0.1, 300)))
    devices = (cluster(3, link=Link(0.1, 2000.0)), cluster(4, link=Link(0.05, 500.0)), Cluster(hosts))[seed % 3]
    return Problem(graph, profile, devices, 8)


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_at_all_is_much_better_on_small_problems(seed):
    asked = drawn(seed)
    ours = min(settle(asked, dapple(asked), judge=Judge(asked)), key=lambda found: found.step_s)
    assert ours.step_s <= exhaustive(asked)[0].step_s * 1.02


@pytest.mark.parametrize("seed", range(3, 9))
def test_straight_and_data_parallel_plans_are_no_better(seed):
    asked = drawn(seed)
    ranks = asked.cluster.ranks
    ours = min(settle(asked, dapple(asked), judge=Judge(asked)), key=lambda found: found.step_s)
    for layout in ((ranks,), (1,) * ranks):
        other = settle(asked, uniform(replace(asked, constraints=Constraints(replicas=layout))), judge=Judge(asked))[0]
        assert ours.step_s <= other.step_s * 1.02, layout


def check_outlines(asked: Problem) -> None:
    found = dapple(asked)
    assert 0 < len(found) <= 8
    assert len(set(found)) == len(found)
    for outline in found:
        assert sorted(rank for group in outline.ranks for rank in group) == list(range(asked.cluster.ranks))
        assert list(outline.cuts) == sorted(set(outline.cuts))
        assert asked.graph.uncuttable.keys().isdisjoint(outline.cuts)
        for cut, here, there in zip(outline.cuts, outline.ranks[:-1], outline.ranks[1:], strict=True):
            assert cut not in asked.graph.unsliceable or len(here) == len(there)
        assert asked.constraints.microbatches in (None, outline.microbatches)
    assert found == dapple(asked)


@pytest.mark.parametrize(
    "constraints",
    [
        Constraints(),
        Constraints(microbatches=4),
        Constraints(warmup="pa"),
        Constraints(schedule="gpipe"),
        Constraints(least_samples=4),
    ],
)
def test_outlines_use_every_device_once_and_keep_to_wishes(constraints):
    graph, profile = layers([1.0, 2.0, 1.0, 1.0, 3.0, 1.0], [8.0] * 6)
    graph = replace(graph, uncuttable={2: "a buffer changes"}, unsliceable=frozenset({4}))
    check_outlines(Problem(graph, profile, cluster(4, link=Link(0.01, 1000.0)), 16, constraints=constraints))
    check_outlines(Problem(graph, profile, cluster(1), 16, constraints=constraints))
    check_outlines(Problem(graph, profile, cluster(4), 16, training=False, constraints=constraints))


def test_many_devices_are_planned_too():
    graph, profile = layers([1.0 + 0.1 * (k % 7) for k in range(40)], [8.0 * (1 + k % 3) for k in range(40)])
    hosts = tuple(Host(name, (Device("x", 1 << 40),) * 6, Link(0, 1e6), Link(0.0, 20.0)) for name in "abc")
    check_outlines(Problem(graph, profile, Cluster(hosts), 64))


def test_graphs_that_cannot_be_sliced_get_equal_stages():
    graph, profile = layers([1.0] * 6, [8.0] * 6)
    whole = replace(graph, unsliceable=frozenset(range(6)))
    found = dapple(Problem(whole, profile, cluster(4, memory=900), 16))
    assert {len({len(group) for group in outline.ranks}) for outline in found} == {1}
    assert len(found[0].ranks) > 1


def test_plans_that_fit_come_first_and_one_comes_always():
    graph, profile = layers([1.0] * 8, [8.0] * 8)
    wide, narrow = (Problem(graph, profile, cluster(4, memory=memory), 16) for memory in (900, 100))
    assert len(ranked(replace(wide, cluster=cluster(4)))[0].outline.ranks) == 1
    assert (ranked(wide)[0].excess <= 0, len(ranked(wide)[0].outline.ranks) > 1) == (True, True)
    assert ranked(narrow)[0].excess > 0


def test_stages_stay_inside_hosts_where_the_network_is_slow():
    graph, profile = layers([1.0] * 6, [8.0] * 6)
    hosts = tuple(Host(name, (Device("x", 1 << 40),) * 4, Link(0, 1e6), Link(0.0, 20.0)) for name in "ab")
    asked = Problem(graph, profile, Cluster(hosts), 32)
    first = dapple(asked)[0]
    assert first.ranks == ((0, 1, 2, 3), (4, 5, 6, 7))


NO_PROFILES = pytest.mark.skipif(not table.PROFILES.exists(), reason="published profiles are not beside the repository")


def model_of(name: str) -> table.Model:
    return next(model for model in table.MODELS if model.name == name)


@NO_PROFILES
@pytest.mark.parametrize(("name", "configuration"), [("vgg-19", "b"), ("vgg-19", "c"), ("gnmt-16", "b")])
def test_plans_of_the_published_kind(name, configuration):
    model = model_of(name)
    entry = table.problem(model, configuration)
    _, found = table.same_kind(entry)
    published = model.published[table.CONFIGURATIONS.index(configuration)]
    assert table.matches(published, found), (published, found)


@NO_PROFILES
@pytest.mark.parametrize(
    ("name", "configuration", "stages", "expected"),
    [
        ("bert-48", "a", 2, 0.06),
        ("bert-48", "b", 16, 0.50),
        ("bert-48", "c", 16, 1.25),
        ("xlnet-36", "b", 2, 0.03),
        ("xlnet-36", "c", 16, 0.67),
    ],
)
def test_communication_weighs_what_the_paper_prints(name, configuration, stages, expected):
    entry = table.problem(model_of(name), configuration)
    each = 16 // stages
    ranks = tuple(tuple(range(s * each, (s + 1) * each)) for s in range(stages))
    first = len(entry.graph.nodes) % 16  # cut between layers only
    cuts = tuple(first + 32 // stages * s for s in range(1, stages))
    outline = Candidate(cuts, ranks, entry.samples // (entry.constraints.least_samples * each), (1,) * stages)
    assert table.ratio(entry, outline) == pytest.approx(expected, rel=0.1, abs=0.005)
