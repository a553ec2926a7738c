"""Laws of the integer program: as good as trying all orders, never worse than what it starts from."""

from __future__ import annotations

import itertools
import math
import operator
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from benchmarks.closed_forms import chain
from lightning_pipe.core.program import Compute, Fetch, Layout, Vacate
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.chain_run import chain_makespan, chain_starts
from lightning_pipe.schedule.construct.devices import bytes_of, fits, peak_bytes
from lightning_pipe.schedule.construct.layout_shapes import looping, zigzag
from lightning_pipe.schedule.construct.stage_times import ChainTimes
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.search.copying import copying_orders
from lightning_pipe.schedule.search.greedy import published_orders
from lightning_pipe.schedule.search.time_windows import TimeWindows, computes_of, inputs_of
from lightning_pipe.schedule.verification.verify import verify

SAVED, KEPT = 2.0, 1.0


def linear(devices: int) -> Layout:
    return looping([(d,) for d in range(devices)], 1)


def unequal_times(seed: int, rooms: Sequence[float]) -> ChainTimes:
    """Return times in whole seconds, so that sums are exact; messages are shorter than computes."""
    draw, p = random.Random(seed), len(rooms)
    some = [tuple(float(draw.randint(2, 6)) for _ in range(p)) for _ in range(3)]
    links = [tuple(float(draw.randint(0, 2)) for _ in range(p - 1)) for _ in range(2)]
    return ChainTimes(*some, *links, (SAVED,) * p, (KEPT,) * p, tuple(rooms))


def every_line(stage: int, microbatches: int, times: ChainTimes) -> Iterator[tuple[Compute, ...]]:
    """Yield all orders of a device with one stage in which micro-batches ascend and memory suffices."""

    def extended(line: tuple[Compute, ...], done: dict[str, int]) -> Iterator[tuple[Compute, ...]]:
        if len(line) == 3 * microbatches:
            yield line
        for kind, before in (("F", microbatches), ("I", done["F"]), ("W", done["I"])):
            longer = (*line, Compute(stage, kind, done[kind]))
            if done[kind] < before and peak_bytes(longer, times) <= times.room_bytes[stage]:
                yield from extended(longer, {**done, kind: done[kind] + 1})

    yield from extended((), {"F": 0, "I": 0, "W": 0})


def makespan(lines: Sequence[Sequence[Compute]], times: ChainTimes, microbatches: int) -> float:
    """Return the longest path; of a stage without a line each kind ascends, and no other turns are taken."""
    stages = len(times.forward_s)
    kinds = [[Compute(s, kind, m) for m in range(microbatches)] for s in range(stages) for kind in "FIW"]
    previous = {b: a for line in (*kinds, *lines) for a, b in itertools.pairwise(line)}
    ends: dict[Compute, float] = {}
    left = [c for line in lines for c in line]
    left += [c for c in computes_of(range(stages), microbatches) if c not in set(left)]
    while left:
        waiting = []
        for c in left:
            before = [
                (a, times.message_s(a.stage, c.stage) if a.stage != c.stage else 0.0)
                for a in inputs_of(c, stages=stages)
            ]
            before += [(previous[c], 0.0)] if c in previous else []
            if all(a in ends for a, _ in before):
                ends[c] = max((ends[a] + wait for a, wait in before), default=0.0) + times.compute_s(c)
            else:
                waiting.append(c)
        if len(waiting) == len(left):
            return math.inf  # the lines wait for each other
        left = waiting
    return max(ends.values())


def least_of_all_orders(times: ChainTimes, microbatches: int) -> float:
    """Return the least makespan by branch and bound: lines of all devices but the first, then those of the first."""
    first, *others = [list(every_line(s, microbatches, times)) for s in range(len(times.forward_s))]
    parts = sorted((makespan(part, times, microbatches), part) for part in itertools.product(*others))
    least = math.inf
    for bound, part in parts:
        if bound >= least:
            break
        least = min(least, *(makespan((line, *part), times, microbatches) for line in first))
    return least


Placed = Compute | Vacate | Fetch


def every_copying_line(microbatches: int, times: ChainTimes) -> Iterator[tuple[Placed, ...]]:
    """Yield all lines of a first device, with any of its micro-batches offloaded, in which memory suffices.

    Memory is given up right before what would not fit otherwise: to wait for a copy sooner only costs time.
    """
    room, size = times.room_bytes[0], times.copied_bytes[0]

    def nexts(done: dict[str, int], away: frozenset[int], back: frozenset[int]) -> Iterator[Placed]:
        """Yield what can come next by data flow; micro-batches ascend in every kind."""
        if done["F"] < microbatches:
            yield Compute(0, "F", done["F"])
        if done["I"] < done["F"] and (done["I"] in back or done["I"] not in away):
            yield Compute(0, "I", done["I"])
        if done["W"] < done["I"]:
            yield Compute(0, "W", done["W"])
        yield from (Vacate(0, m) for m in range(max(done["I"], done["VACATE"]), done["F"]))
        yield from (Fetch(0, m) for m in sorted(away - back)[:1])

    def extended(line, held: float, done: dict[str, int], away, back) -> Iterator[tuple[Placed, ...]]:
        if done["W"] == microbatches:
            yield line
        for one in nexts(done, away, back):
            needs, m = bytes_of(one, times), one.microbatch
            is_behind_vacate = bool(line) and isinstance(line[-1], Vacate)
            if held + needs > room or (is_behind_vacate and held + size + needs <= room):
                continue
            if isinstance(one, Compute):
                yield from extended((*line, one), held + needs, {**done, one.kind: m + 1}, away, back)
            elif isinstance(one, Vacate):
                yield from extended((*line, one), held + needs, {**done, "VACATE": m + 1}, away | {m}, back)
            else:
                yield from extended((*line, one), held + needs, done, away, back | {m})

    yield from extended((), 0.0, dict.fromkeys(("F", "I", "W", "VACATE"), 0), frozenset(), frozenset())


def copying_makespan(lines: Sequence[Sequence[Placed]], times: ChainTimes, microbatches: int) -> float:
    """Return the longest path as `makespan` does, with copies: on one lane in each direction, in the order of the line.

    A copy out follows its F, `Vacate` waits for its end; a copy back follows `Fetch`, and I waits for its end.
    """
    stages = len(times.forward_s)
    kinds = [[Compute(s, kind, m) for m in range(microbatches)] for s in range(stages) for kind in "FIW"]
    seconds: dict[object, float] = {c: times.compute_s(c) for c in itertools.chain(*kinds)}
    inputs: dict[object, list[tuple[object, float]]] = {
        c: [(a, times.message_s(a.stage, c.stage) if a.stage != c.stage else 0.0) for a in inputs_of(c, stages=stages)]
        for c in itertools.chain(*kinds)
    }
    leaving = [one for line in lines for one in line if isinstance(one, Vacate)]
    coming = [one for line in lines for one in line if isinstance(one, Fetch)]
    for one in (*leaving, *coming):
        inputs[one], seconds[one] = [], 0.0
        inputs["copy", one], seconds["copy", one] = [], times.copy_s[one.stage]
    for one in leaving:
        inputs["copy", one].append((Compute(one.stage, "F", one.microbatch), 0.0))
        inputs[one].append((("copy", one), 0.0))
    for one in coming:
        inputs["copy", one].append((one, 0.0))
        inputs[Compute(one.stage, "I", one.microbatch)].append((("copy", one), 0.0))
    for lane in (leaving, coming):
        for a, b in itertools.pairwise(lane):
            inputs["copy", b].append((("copy", a), 0.0))
    for a, b in itertools.chain.from_iterable(map(itertools.pairwise, (*kinds, *lines))):
        inputs[b].append((a, 0.0))
    return longest_path(inputs, seconds)


def longest_path(inputs: dict[object, list[tuple[object, float]]], seconds: dict[object, float]) -> float:
    """Return when all have ended; endless if they wait for each other."""
    ends: dict[object, float] = {}

    def end(one: object) -> float:
        if one not in ends:
            ends[one] = math.inf  # as long as it waits for itself
            ends[one] = max((end(a) + wait for a, wait in inputs[one]), default=0.0) + seconds[one]
        return ends[one]

    return max(map(end, inputs))


def best_fixed(layout: Layout, microbatches: int, times: ChainTimes) -> float:
    """Return the makespan of the best published order that fits, 1F1B with up to four warm-up forwards among them."""
    depths = itertools.product(range(1, 5), repeat=len(layout.stages))
    orders = [*published_orders(layout, microbatches, times)]
    orders += (
        order_of("1f1b", layout=layout, microbatches=microbatches, options={"warmup": ",".join(map(str, deep))})
        for deep in depths
        if all(b <= a for a, b in itertools.pairwise(deep))
    )
    return min(chain_makespan(order, layout, times) for order in orders if fits(order, times))


@pytest.mark.parametrize(("seed", "rooms"), [(73, (4.0, 4.0, 2.0)), (6, (5.0, 3.0, 2.0))])
def test_the_program_finds_the_least_of_all_orders_where_1f1b_has_no_room(seed, rooms):
    """Three devices and four micro-batches; 1F1B would keep three, two and one of two bytes each."""
    times, layout = unequal_times(seed, rooms), linear(3)
    assert not fits(order_of("1f1b", layout=layout, microbatches=4), times)
    order = order_of("milp", layout=layout, microbatches=4, times=times)
    found = chain_makespan(order, layout, times)
    assert fits(order, times)
    assert found == least_of_all_orders(times, 4)
    assert found < best_fixed(layout, 4, times)
    assert found < chain_makespan(order_of("greedy", layout=layout, microbatches=4, times=times), layout, times)


LONG = pytest.param(5, 4, 4.0, 3.0, marks=pytest.mark.slow)


@pytest.mark.parametrize(("seed", "microbatches", "room", "copy_s"), [(0, 3, 3.0, 4.0), (1, 3, 3.0, 4.0), LONG])
def test_the_program_copies_as_well_as_the_best_of_all_orders_and_copies(seed, microbatches, room, copy_s):
    """Three devices, the first of which can offload and has no room for what 1F1B would keep."""
    layout = linear(3)
    plain = unequal_times(seed, (room, 4.0, 4.0))
    times = replace(plain, copied_bytes=(SAVED, 0.0, 0.0), copy_s=(copy_s, 0.0, 0.0))
    assert not fits(order_of("1f1b", layout=layout, microbatches=microbatches), times)
    order = order_of("milp", layout=layout, microbatches=microbatches, times=times)
    found = chain_makespan(order, layout, times)
    assert fits(order, times)
    assert found == copying_makespan(order, times, microbatches) < taken("milp", layout, microbatches, plain)
    others = [list(every_line(s, microbatches, times)) for s in (1, 2)]
    lines = [x for x in every_copying_line(microbatches, times) if copying_makespan([x], times, microbatches) < found]
    others = [[line for line in part if makespan([line], times, microbatches) < found] for part in others]
    parts = [part for part in itertools.product(*others) if makespan(part, times, microbatches) < found]
    better = [
        (line, part)
        for line, part in itertools.product(lines, parts)
        if copying_makespan([line, *part], times, microbatches) < found
    ]
    assert not better


def taken(name: str, layout: Layout, microbatches: int, times: ChainTimes, **options: int | str) -> float:
    """Return the makespan of an order that fits."""
    order = order_of(name, layout=layout, microbatches=microbatches, times=times, options=options)
    assert fits(order, times)
    return chain_makespan(order, layout, times)


@pytest.mark.parametrize("seconds", [0, "0.5", pytest.param(10, marks=pytest.mark.slow)])
def test_the_program_is_never_worse_than_the_best_fixed_order_that_it_starts_from(seconds):
    layout = linear(4)
    for seed in range(3):
        times = unequal_times(seed, (6.0, 5.0, 4.0, 3.0))
        found = taken("milp", layout, 8, times, seconds=seconds)
        assert found <= taken("greedy", layout, 8, times)
        assert found <= best_fixed(layout, 8, times)


@pytest.mark.parametrize("layout", [linear(4), looping([(0,), (1,)], 2), zigzag([(0, 1), (2,)], 2)], ids=str)
def test_orders_that_copy_what_is_needed_last_fit_and_are_no_slower_in_the_end(layout):
    count = len(layout.stages)
    for seed in range(2):
        times = unequal_times(seed, (5.0,) * count)
        times = replace(times, room_bytes=(5.0,) * layout.ranks, copied_bytes=(1.5,) * count, copy_s=(3.0,) * count)
        found = taken("milp", layout, 5, times, seconds=0)
        orders = [*copying_orders(layout, 5, times)]
        assert orders and all(fits(order, times) for order in orders)
        assert found <= min(chain_makespan(order, layout, times) for order in orders)
        traffic = replace(chain(count), offloads=tuple(range(count)))
        for order in orders:
            verify(lower(order, layout=layout, sizes=(2,) * 5, traffic=traffic))


def test_two_stages_on_a_device_are_solved_too():
    """Messages of one channel wait for each other, of which the program knows nothing; it still is no worse."""
    gained = 0.0
    for seed in range(2):
        for layout in (looping([(0,), (1,)], 2), zigzag([(0,), (1,)], 2)):
            times = unequal_times(seed, (5.0, 5.0, 5.0, 5.0))
            away = [float(layout.stages[s] != layout.stages[s + 1]) for s in range(3)]
            links = [tuple(map(operator.mul, link, away)) for link in (times.ahead_s, times.back_s)]
            times = replace(times, ahead_s=links[0], back_s=links[1], room_bytes=(5.0, 5.0))
            gain = taken("greedy", layout, 3, times) - taken("milp", layout, 3, times, seconds=2)
            assert gain >= 0
            gained += gain
    assert gained > 0


def test_no_order_is_quicker_than_the_windows_allow():
    """Every compute starts after its head, and the end comes no sooner than its tail after it."""
    layout = linear(3)
    for seed in range(5):
        times = unequal_times(seed, (math.inf,) * 3)
        windows = TimeWindows(layout, 5, times)
        for order in published_orders(layout, 5, times):
            end, starts = chain_makespan(order, layout, times), chain_starts(order, layout, times)
            assert end >= windows.least()
            for compute, start in zip(itertools.chain(*order), itertools.chain(*starts), strict=True):
                if compute.kind != "B":
                    assert windows.head[compute] <= start <= end - times.compute_s(compute) - windows.tail[compute]


def test_less_room_than_one_microbatch_needs_gives_the_greedy_order():
    layout, times = linear(3), unequal_times(0, (1.0, 4.0, 4.0))
    order = order_of("milp", layout=layout, microbatches=3, times=times)
    assert order == order_of("greedy", layout=layout, microbatches=3, times=times)


def test_many_microbatches_are_left_to_greedy():
    layout, times = linear(2), unequal_times(0, (20.0, 20.0))
    order = order_of("milp", layout=layout, microbatches=80, times=times)
    assert order == order_of("greedy", layout=layout, microbatches=80, times=times)


def test_the_missing_solver_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ConfigError, match="'milp' was asked for, but scipy is not installed"):
        taken("milp", linear(3), 4, unequal_times(64, (4.0, 4.0, 2.0)))


@pytest.mark.parametrize("seconds", [-1, "long", "nan"])
def test_a_time_that_cannot_be_meant_is_named(seconds):
    with pytest.raises(ConfigError, match=f"found seconds {seconds!r}; expected a number of seconds"):
        order_of("milp", layout=linear(2), microbatches=2, options={"seconds": seconds})
