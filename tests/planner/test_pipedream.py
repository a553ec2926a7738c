"""What PipeDream's planner promises: the paper's equations, its published plans, and SPP's partitions without links."""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.planner.candidates.cut_points import cuttable
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.systems.pipedream import Level, noam_depths, pipedream, steady_plans
from lightning_pipe.planner.systems.spp.spp_partition import partitions
from lightning_pipe.profiles.published import load_published
from planner.test_spp import hosts, problem
from planner.test_uniform import layers

PROFILES = Path(__file__).parents[2].parent / "shared/profiles/pipedream_msr_fiddle"
GBIT = 1e9 / 8


def machines(count: int, devices: int, *, network: float, inside: float = 1e10, memory: int = 1 << 50) -> Cluster:
    row = (Device("x", memory),) * devices
    return Cluster(tuple(Host(f"h{i}", row, Link(0.0, inside), Link(0.0, network)) for i in range(count)))


def published(name: str, batch: int, devices: Cluster) -> Problem:
    path = PROFILES / name / "graph.txt"
    if not path.exists():
        pytest.skip(f"the published profile {path} is not here")
    graph, profile = load_published(path, batch=batch)
    return Problem(graph, profile, devices, batch)


def best(asked: Problem, view: str) -> list[int]:
    plan = next(plan for plan in steady_plans(asked) if plan.view == view)
    return [len(group) for group in plan.ranks]


@pytest.mark.parametrize(
    ("name", "batch", "workers", "gbit", "replicas"),
    [
        ("vgg16", 128, 16, 10, [15, 1]),
        ("vgg16", 128, 16, 25, [15, 1]),
        ("alexnet", 256, 16, 10, [15, 1]),
        ("gnmt", 64, 4, 10, [1, 1, 1, 1]),
        ("gnmt", 64, 4, 25, [1, 1, 1, 1]),
        ("gnmt_large", 64, 4, 10, [1, 1, 1, 1]),
    ],
)
def test_published_flat_plans_are_found_again(name, batch, workers, gbit, replicas):
    asked = published(name, batch, machines(workers, 1, network=gbit * GBIT))
    assert best(asked, "flat") == replicas


def test_two_levels_replicate_inside_hosts_first():
    asked = published("vgg16", 128, machines(4, 4, network=10 * GBIT))
    assert best(asked, "hierarchical") == [12, 2, 1, 1]


def drawn(size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return seconds and parameters of every range of layers, and outputs at every bound."""
    draw = np.random.default_rng(seed)
    seconds, weights = (np.concatenate([[0.0], draw.uniform(0.5, 5, size)]).cumsum() for _ in range(2))
    outputs = draw.uniform(0.0, 4.0, size + 1)
    return np.subtract.outer(-seconds, -seconds), np.subtract.outer(-weights, -weights), outputs


def by_the_equations(below, weights, outputs, rate: float, workers: int):
    """Return A^k(a, b, m) by the paper's recursion, as it stands; `below` is A^(k-1)(a, b)."""

    def replicated(a: int, b: int, m: int) -> float:
        return max(below(a, b), 2 * (m - 1) * weights[a, b] / rate) / m

    @functools.cache
    def least(a: int, b: int, m: int) -> float:
        found = replicated(a, b, m)
        for s in range(a + 1, b):
            for last in range(1, m):
                found = min(found, max(least(a, s, m - last), 2 * outputs[s] / rate, replicated(s, b, last)))
        return found

    return least


def stages_of(below: np.ndarray, weights: np.ndarray, rate: float):
    is_stage = np.triu(np.ones(below.shape, dtype=bool), k=1)

    def load(first: int, m: int) -> np.ndarray:
        return np.where(is_stage, np.maximum(below, 2 * (m - 1) * weights / rate) / m, np.inf)

    return load


@pytest.mark.parametrize("seed", range(5))
def test_levels_are_those_of_the_equations(seed):
    size, devices, count = 6, 3, 3
    seconds, weights, outputs = drawn(size, seed)
    inner = by_the_equations(lambda a, b: seconds[a, b], weights, outputs, 3.0, devices)
    inside = Level(
        stages_of(seconds, weights, 3.0), 2 * outputs / 3.0, workers=devices, degrees=(1, 2, 3), starts=size + 1
    )
    alone = inside.best(devices)
    for a, b in itertools.combinations(range(size + 1), 2):
        assert alone[a, b] == pytest.approx(inner(a, b, devices)), (a, b)
    outer = by_the_equations(lambda a, b: inner(a, b, devices), weights, outputs, 1.0, count)
    between = Level(stages_of(alone, weights, 1.0), 2 * outputs, workers=count, degrees=(1, 2, 3))
    assert between.best(count)[0, size] == pytest.approx(outer(0, size, count))


@pytest.mark.parametrize("seed", range(5))
def test_traced_stages_are_as_slow_as_the_table_says(seed):
    seconds, weights, outputs = drawn(7, seed)
    load = stages_of(seconds, weights, 2.0)
    level = Level(load, outputs, workers=6, degrees=range(1, 7))
    for found, stages in level.plans(0, 7, 6):
        assert (stages[0].a, stages[-1].b, sum(stage.count for stage in stages)) == (0, 7, 6)
        assert all(s.b == t.a and s.first + s.count == t.first for s, t in itertools.pairwise(stages))
        slowest = [load(s.first, s.count)[s.a, s.b] for s in stages] + [outputs[s.b] for s in stages[:-1]]
        assert found == pytest.approx(max(slowest))


class Flat:
    """Costs of PipeDream's flat program as PRM takes them."""

    def __init__(self, load, links: np.ndarray) -> None:
        self._load, self._links = load, links

    def stages(self, first, degrees, behind):
        return np.stack([self._load(first, degree) for degree in degrees])

    def links(self, first, degree, degrees):
        return np.stack([self._links] * len(degrees))


@pytest.mark.parametrize("seed", range(5))
def test_partitions_of_spp_are_the_flat_program_where_links_and_sums_cost_the_same(seed):
    seconds, weights, outputs = drawn(8, seed)
    load = stages_of(seconds, weights, 2.0)
    flat = Level(load, outputs, workers=6, degrees=range(1, 7)).best(6)[0, 8]
    found = partitions(Flat(load, outputs), units=6, degrees=range(1, 7), last=8)
    assert min(partition.worst for partition in found if partition is not None) == pytest.approx(flat)


def test_the_first_stage_has_the_papers_number_of_mini_batches_in_flight():
    assert noam_depths([1, 1, 1, 1]) == (4, 3, 2, 1)
    assert noam_depths([15, 1]) == (2, 1)
    assert noam_depths([2, 1, 1]) == (3, 2, 1)  # the paper's would be 2, 2, 1
    assert noam_depths([1, 2, 2]) == (5, 2, 1)
    assert noam_depths([16]) == (1,)


@pytest.mark.parametrize(
    ("nodes", "devices", "constraints"),
    [
        (1, hosts(1, 4), {}),
        (6, hosts(1, 1), {}),
        (12, hosts(2, 4), {}),
        (12, hosts(2, 4), {"microbatches": 3}),
        (12, hosts(2, 4), {"least_samples": 16}),
        (12, hosts(2, 4), {"microbatches": 64, "least_samples": 4}),
        (12, hosts(2, 4), {"schedule": "gpipe"}),
        (12, hosts(2, 4), {"warmup": "pb"}),
        (12, hosts(3, 1, memory=1000), {}),
        (12, hosts(5, 1), {}),
        (12, Cluster((*hosts(1, 3).hosts, *hosts(2, 2).hosts[1:])), {}),
    ],
)
def test_outlines_use_every_device_once_and_keep_to_wishes(nodes, devices, constraints):
    asked = problem(nodes, devices, **constraints)
    outlines = pipedream(asked)
    assert 1 <= len(outlines) <= 8
    assert len(set(outlines)) == len(outlines)
    assert outlines == pipedream(asked)
    for outline in outlines:
        assert sorted(rank for group in outline.ranks for rank in group) == list(range(devices.ranks))
        assert list(outline.depths) == sorted(outline.depths, reverse=True)
        assert outline.microbatches == constraints.get("microbatches", outline.microbatches)
        if "microbatches" not in constraints:
            least = constraints.get("least_samples", 1)
            assert max(map(len, outline.ranks)) * outline.microbatches * least <= max(64, least)
    Judge(asked).judge(outlines[0].plan(asked))
    Judge(asked).judge(outlines[-1].plan(asked))


def test_memory_forbids_stages_for_which_it_is_too_small():
    free = replace(problem(12, hosts(1, 4)), constraints=Constraints(microbatches=8))
    free = replace(free, graph=replace(free.graph, parameter_bytes=dict.fromkeys(free.graph.parameter_bytes, 10**6)))
    assert max(map(len, pipedream(free)[0].ranks)) > 1
    whole = StageCostTable(free, cuttable(free.graph, sliced=True)).state_bytes[0, -1]
    tight = replace(free, cluster=hosts(1, 4, memory=int(0.7 * whole)))
    outline = pipedream(tight)[0]
    assert max(Judge(tight).judge(outline.plan(tight)).peak_bytes) <= 0.7 * whole


def test_faster_devices_get_more_layers():
    fast, slow = Device("x", 1 << 40, 3.0), Device("y", 1 << 40)
    link = Link(0.0, 1e3)
    graph, profile = layers([1.0] * 8, [8.0] * 8, samples=64)
    asked = Problem(graph, profile, Cluster((Host("a", (fast, slow), link, link),)), 64)
    straight = next(plan for plan in steady_plans(asked) if plan.view == "straight")
    assert straight.cuts == (6,)


def test_long_chains_are_cut_between_coarse_positions():
    draw = random.Random(0)
    graph, profile = layers([draw.uniform(0.5, 2.0) for _ in range(300)], [8.0] * 300, samples=64)
    asked = Problem(graph, profile, machines(4, 1, network=1e12), 64)
    ideal = sum(map(sum, profile.seconds)) / 3 * 64 / 4  # seconds at 1 and 2 samples
    straight = next(plan for plan in steady_plans(asked) if plan.view == "straight")
    assert straight.seconds == pytest.approx(ideal, rel=0.01)
    assert math.isfinite(straight.seconds)
