"""What SPP's planner promises: exact partitions of a row, a bound that holds, plans within memory."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.candidates.cut_points import cuttable
from lightning_pipe.planner.estimates.block_costs import BlockCosts, DeviceRow, RowSeconds, within_memory
from lightning_pipe.planner.estimates.recurrence import Estimator, PipelineTimes, row_s
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.systems.spp.spp_partition import partitions
from lightning_pipe.planner.systems.spp.spp_planner import pe_bound, pe_depths, spp
from planner.test_uniform import FAST, layers


class Drawn:
    """Random costs; a stage's depend on its block, a link's on both blocks."""

    def __init__(self, bounds: int, units: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        shape = (units, units + 1)
        self._stages = draw.uniform(1.0, 9.0, (*shape, bounds, bounds)).cumsum(axis=3)
        self._links = draw.uniform(0.0, 9.0, (*shape, units + 1, bounds))

    def stages(self, first, degrees, behind):
        found = self._stages[first, list(degrees)] + 0.1 * behind
        return np.where(np.triu(np.ones(found.shape[1:]), k=1) > 0, found, np.inf)

    def links(self, first, degree, degrees):
        return self._links[first, degree, list(degrees)]


def parts(total: int, count: int):
    for ends in itertools.combinations(range(1, total), count - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *ends, total)))


def by_trying_all(costs: Drawn, units: int, last: int, stages: int) -> float:
    best = np.inf
    for degrees in parts(units, stages):
        firsts = [0, *itertools.accumulate(degrees)]
        for cuts in itertools.combinations(range(1, last), stages - 1):
            ends = (0, *cuts, last)
            worst = max(
                costs.stages(firsts[s], (degrees[s],), stages - 1 - s)[0, ends[s], ends[s + 1]] for s in range(stages)
            )
            for s, cut in enumerate(cuts):
                worst = max(worst, costs.links(firsts[s], degrees[s], (degrees[s + 1],))[0, cut])
            best = min(best, worst)
    return best


@pytest.mark.parametrize(("last", "units"), [(1, 1), (2, 4), (4, 3), (6, 4), (5, 4)])
@pytest.mark.parametrize("seed", range(4))
def test_partitions_are_those_that_trying_all_finds(last, units, seed):
    costs = Drawn(last + 1, units, seed)
    found = list(partitions(costs, units=units, degrees=range(1, units + 1), last=last))
    assert len(found) == min(last, units)
    for stages, partition in enumerate(found, start=1):
        assert partition.worst == pytest.approx(by_trying_all(costs, units, last, stages))
        assert (len(partition.bounds), sum(partition.degrees)) == (stages - 1, units)
        firsts = [0, *itertools.accumulate(partition.degrees)]
        ends = (0, *partition.bounds, last)
        worst = [
            costs.stages(firsts[s], (d,), stages - 1 - s)[0, ends[s], ends[s + 1]]
            for s, d in enumerate(partition.degrees)
        ]
        assert max(worst) <= partition.worst + 1e-12


# PE: in cycle t step j works on micro-batch t - j; blocks run in that order as soon as inputs and devices are there


def executed_s(draw: random.Random, stages: int, microbatches: int) -> tuple[RowSeconds, float]:
    """Return a random pipeline, and the seconds of PE's order on it."""
    forward = [draw.uniform(0.1, 5) for _ in range(stages)]
    backward = [draw.uniform(0.1, 5) for _ in range(stages)]
    ahead, back = ([draw.uniform(0, 6) for _ in range(stages - 1)] for _ in range(2))
    sums = [draw.uniform(0, 9) for _ in range(stages)]
    steps = []  # (resource, seconds)
    for s in range(stages - 1):
        steps += [(f"device {s}", forward[s]), (f"link {s}", ahead[s])]
    steps.append((f"device {stages - 1}", forward[-1] + backward[-1]))
    for s in reversed(range(stages - 1)):
        steps += [(f"link {s}", back[s]), (f"device {s}", backward[s])]
    free: dict[str, float] = {}
    done: dict[tuple[int, int], float] = {}
    for cycle in range(microbatches + len(steps) - 1):
        for j, (resource, seconds) in enumerate(steps):
            m = cycle - j
            if 0 <= m < microbatches:
                begin = max(free.get(resource, 0.0), done.get((j - 1, m), 0.0))
                free[resource] = done[j, m] = begin + seconds
    loads = tuple(f + b for f, b in zip(forward, backward, strict=True))
    links = tuple(f + b for f, b in zip(ahead, back, strict=True))
    end = max(free[f"device {s}"] + sums[s] for s in range(stages))
    return RowSeconds(loads, links, tuple(sums)), end


@pytest.mark.parametrize("seed", range(60))
def test_no_execution_in_cycles_takes_longer_than_its_bound(seed):
    draw = random.Random(seed)
    stages, microbatches = draw.randint(1, 6), draw.randint(1, 12)
    pipeline, seconds = executed_s(draw, stages, microbatches)
    assert seconds <= pe_bound(pipeline, microbatches=microbatches) + 1e-9


def test_cycles_keep_as_many_micro_batches_as_their_depths():
    for stages in (1, 2, 5):
        steps = 4 * stages - 3  # forward of stage s is step 2 s, its backward step 4 (stages - 1) - 2 s
        spans = [4 * (stages - 1) - 2 * s - 2 * s + 1 for s in range(stages)]
        assert pe_depths(stages, is_free=False) == tuple(spans)
        assert max(spans) == steps
    assert pe_depths(3, is_free=True) == (5, 3, 1)


@pytest.mark.parametrize("seed", range(30))
def test_one_forward_one_backward_with_the_depths_of_cycles_keeps_the_bound(seed):
    draw = random.Random(seed)
    stages, microbatches = draw.randint(1, 6), draw.randint(1, 24)
    forward, backward, finish = ([draw.uniform(0.1, 5) for _ in range(stages)] for _ in range(3))
    ahead, back = ([draw.uniform(0, 6) for _ in range(stages - 1)] for _ in range(2))
    row = PipelineTimes(*map(tuple, (forward, backward, ahead, back, finish)), late=(0.0,) * stages)
    bound = pe_bound(RowSeconds(tuple(row.loads()), tuple(row.links()), row.finish), microbatches=microbatches)
    seconds = row_s(row, depths=pe_depths(stages, is_free=False), microbatches=microbatches)
    assert seconds <= bound + 1e-9


def hosts(count: int, devices: int, **more) -> Cluster:
    network = more.pop("network", Link(1e-4, 1e9))
    device = Device("x", more.pop("memory", 1 << 40))
    return Cluster(tuple(Host(f"h{i}", (device,) * devices, Link(1e-5, 1e10), network) for i in range(count)))


def problem(nodes: int, devices: Cluster, *, wide: float = 1e5, samples: int = 64, **constraints) -> Problem:
    draw = random.Random(nodes)
    seconds = [draw.uniform(0.5, 2.0) * 1e-3 for _ in range(nodes)]
    graph, profile = layers(seconds, [draw.choice((1e3, wide)) for _ in range(nodes)], samples=samples)
    return Problem(graph, profile, devices, samples, constraints=Constraints(**constraints))


UNEQUAL = Cluster((Host("a", (Device("x", 1 << 40), Device("y", 1 << 40, 0.5)), FAST, FAST), *hosts(2, 2).hosts[1:]))


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
        (12, hosts(2, 4), {"warmup": "pa"}),
        (12, hosts(3, 1, memory=1000), {}),
        (12, UNEQUAL, {}),
    ],
)
def test_outlines_use_every_device_once_and_keep_to_wishes(nodes, devices, constraints):
    asked = problem(nodes, devices, **constraints)
    outlines = spp(asked)
    assert 1 <= len(outlines) <= 8
    assert len(set(outlines)) == len(outlines)
    assert outlines == spp(asked)
    for outline in outlines:
        assert sorted(rank for group in outline.ranks for rank in group) == list(range(devices.ranks))
        assert list(outline.depths) == sorted(outline.depths, reverse=True)
        assert outline.microbatches == constraints.get("microbatches", outline.microbatches)
    Judge(asked).judge(outlines[-1].plan(asked))
    if "least_samples" in constraints and "microbatches" not in constraints:
        for outline in outlines:
            assert max(map(len, outline.ranks)) * outline.microbatches * 16 <= 64


def test_memory_shapes_the_best_plan():
    free = problem(12, hosts(1, 4), microbatches=8)
    free = replace(free, graph=replace(free.graph, parameter_bytes=dict.fromkeys(free.graph.parameter_bytes, 10**7)))
    assert max(len(group) for group in spp(free)[0].ranks) > 1
    whole = max(Judge(free).judge(spp(free)[0].plan(free)).peak_bytes)
    tight = replace(free, cluster=hosts(1, 4, memory=whole // 2))
    outline = spp(tight)[0]
    assert max(Judge(tight).judge(outline.plan(tight)).peak_bytes) <= whole // 2, outline


def test_memory_lowers_depths():
    free = problem(12, hosts(4, 1), wide=1e6, microbatches=16)
    outline = Candidate((3, 6, 9), ((0,), (1,), (2,), (3,)), 16, pe_depths(4, is_free=False))
    assert within_memory(Estimator(StageCostTable(free, [3, 6, 9])), outline)[0].depths == (13, 9, 5, 1)
    estimator = Estimator(StageCostTable(free, sorted(outline.cuts)))
    room = estimator.rooms(outline.cuts, outline.ranks, 16)[0]
    state = (1 << 40) - room.bytes

    def depths(fitting: float) -> tuple[int, ...]:
        tight = replace(free, cluster=hosts(4, 1, memory=int(state + fitting * room.saved)))
        lowered, missing = within_memory(Estimator(StageCostTable(tight, [3, 6, 9])), outline)
        assert missing <= 0
        return lowered.depths

    assert depths(9.5)[0] in (7, 8, 9)
    assert [len({*depths(fitting)}) for fitting in (6.5, 8.5, 9.5, 12.5)] == [4] * 4  # all different
    assert depths(2.5)[0] == 2


def test_stages_with_equal_depths_wait_for_each_other():
    row = PipelineTimes((1.0,) * 4, (2.0,) * 4, (0.1,) * 3, (0.1,) * 3, (0.0,) * 4, (0.0,) * 4)
    equal, different = (row_s(row, depths=depths, microbatches=64) for depths in ((8, 8, 8, 8), (4, 3, 2, 1)))
    assert equal > 2 * different


def test_a_slow_network_is_crossed_once():
    outline = spp(problem(12, hosts(2, 4, network=Link(1e-4, 1e6)), microbatches=8))[0]
    devices = hosts(2, 4)
    visited = [devices.host_of(rank) for group in outline.ranks for rank in group]
    assert sum(a != b for a, b in itertools.pairwise(visited)) == 1


def test_faster_devices_get_more_work():
    fast, slow = Device("x", 1 << 40, 3.0), Device("y", 1 << 40)
    devices = Cluster((Host("a", (fast, slow), FAST, FAST),))
    graph, profile = layers([1.0] * 8, [8.0] * 8, samples=64)
    straight = [o for o in spp(Problem(graph, profile, devices, 64)) if len(o.ranks) == 2]
    assert straight[0].cuts == (6,)


def test_blocks_cost_what_exact_prices_say():
    asked = problem(10, hosts(2, 4), samples=480)  # micro-batches that all of these replicas divide
    segments = StageCostTable(asked, cuttable(asked.graph, sliced=True))
    row = DeviceRow(asked.cluster, range(8), most=8)
    estimator = Estimator(segments)
    for bounds, degrees in (((4,), (3, 5)), ((2, 5), (4, 2, 2)), ((3,), (2, 6)), ((), (8,)), ((5,), (6, 2))):
        firsts = itertools.accumulate(degrees, initial=0)
        ranks = tuple(row.ranks(first, count) for first, count in zip(firsts, degrees, strict=False))
        exact = estimator.row([int(segments.bounds[bound]) for bound in bounds], ranks, 4)
        found = BlockCosts(segments, row, samples=asked.samples / 4).pipeline(bounds, degrees)
        assert found.loads == pytest.approx(exact.loads())
        assert found.links == pytest.approx(exact.links())
        assert found.sums == pytest.approx(exact.finish, rel=0.1)


def test_replicas_wait_for_those_with_one_sample_more():
    asked = problem(10, hosts(1, 3))
    segments = StageCostTable(asked, cuttable(asked.graph, sliced=True))
    blocks = BlockCosts(segments, DeviceRow(asked.cluster, range(3), most=8), samples=16)
    assert blocks.load_s(0, 3)[0, 5] == pytest.approx(6 / 16 * blocks.load_s(0, 1)[0, 5])


def test_blocks_by_matrices_and_of_one_pipeline_agree():
    asked = problem(10, UNEQUAL)
    segments = StageCostTable(asked, cuttable(asked.graph, sliced=True))
    blocks = BlockCosts(segments, DeviceRow(asked.cluster, range(4), most=8), samples=16)
    found = blocks.pipeline((3, 6), (2, 1, 1))
    assert found.loads[1] == pytest.approx(blocks.load_s(2, 1)[3, 6])
    assert found.sums[0] == pytest.approx(blocks.sum_s(0, 2)[0, 3])
    assert found.links[0] == pytest.approx(blocks.link_s(0, 2, (1,))[0, 3])


@pytest.mark.parametrize(
    ("count", "devices", "most", "units"), [(2, 4, 8, 8), (2, 4, 4, 4), (2, 4, 2, 2), (5, 2, 3, 3)]
)
def test_many_devices_are_taken_together_without_tearing_hosts(count, devices, most, units):
    row = DeviceRow(hosts(count, devices), range(count * devices), most=most)
    assert (len(row), [rank for unit in row.units for rank in unit]) == (units, list(range(count * devices)))


def test_large_problems_are_planned():
    outlines = spp(problem(12, hosts(64, 4), microbatches=16))
    assert sorted(rank for group in outlines[0].ranks for rank in group) == list(range(256))
