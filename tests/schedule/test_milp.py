"""Laws of the integer program: as good as trying all orders, never worse than what it starts from."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterator, Sequence

import pytest

from lightning_pipe.core.program import Compute, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.chain_run import chain_makespan
from lightning_pipe.schedule.devices import fits, peak_bytes
from lightning_pipe.schedule.greedy import fixed_orders
from lightning_pipe.schedule.shapes import looping, zigzag
from lightning_pipe.schedule.times import Times
from lightning_pipe.schedule.windows import Windows, computes_of, inputs_of, must_precede

SAVED, KEPT = 2.0, 1.0


def linear(devices: int):
    return looping([(d,) for d in range(devices)], 1)


def unequal_times(seed: int, rooms: Sequence[float]) -> Times:
    """Return times in whole seconds, so that sums are exact; messages are shorter than computes."""
    draw, p = random.Random(seed), len(rooms)
    some = [tuple(float(draw.randint(2, 6)) for _ in range(p)) for _ in range(3)]
    links = [tuple(float(draw.randint(0, 2)) for _ in range(p - 1)) for _ in range(2)]
    return Times(*some, *links, (SAVED,) * p, (KEPT,) * p, tuple(rooms))


def every_line(stage: int, microbatches: int, times: Times) -> Iterator[tuple[Compute, ...]]:
    """Yield all orders of a device with one stage in which micro-batches ascend and memory suffices."""

    def extended(line: tuple[Compute, ...], done: dict[str, int]) -> Iterator[tuple[Compute, ...]]:
        if len(line) == 3 * microbatches:
            yield line
        for kind, before in (("F", microbatches), ("I", done["F"]), ("W", done["I"])):
            longer = (*line, Compute(stage, kind, done[kind]))
            if done[kind] < before and peak_bytes(longer, times) <= times.room_bytes[stage]:
                yield from extended(longer, {**done, kind: done[kind] + 1})

    yield from extended((), {"F": 0, "I": 0, "W": 0})


def makespan(lines: Sequence[Sequence[Compute]], times: Times, microbatches: int) -> float:
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


def least_of_all_orders(times: Times, microbatches: int) -> float:
    """Return the least makespan by branch and bound: lines of all devices but the first, then those of the first."""
    first, *others = [list(every_line(s, microbatches, times)) for s in range(len(times.forward_s))]
    parts = sorted(((makespan(part, times, microbatches), part) for part in itertools.product(*others)))
    least = math.inf
    for bound, part in parts:
        if bound >= least:
            break
        least = min(least, *(makespan((line, *part), times, microbatches) for line in first))
    return least


def best_fixed(layout, microbatches: int, times: Times) -> tuple[float, Order]:
    """Return the best published order that fits, among them 1F1B with all depths."""
    depths = itertools.product(range(1, microbatches + 1), repeat=len(layout.stages))
    orders = [*fixed_orders(layout, microbatches, times)]
    orders += (
        order_of("1f1b", layout=layout, microbatches=microbatches, options={"warmup": ",".join(map(str, deep))})
        for deep in depths
        if all(b <= a for a, b in itertools.pairwise(deep))
    )
    return min((chain_makespan(order, layout, times), order) for order in orders if fits(order, times))


@pytest.mark.parametrize(("seed", "rooms"), [(0, (4.0, 3.0, 3.0)), (1, (5.0, 3.0, 2.0)), (2, (4.0, 3.0, 3.0))])
def test_the_program_finds_the_least_of_all_orders_where_1f1b_has_no_room(seed, rooms):
    """Three devices and four micro-batches; 1F1B would keep three, two and one of two bytes each."""
    times, layout = unequal_times(seed, rooms), linear(3)
    assert not fits(order_of("1f1b", layout=layout, microbatches=4), times)
    order = order_of("milp", layout=layout, microbatches=4, times=times)
    found = chain_makespan(order, layout, times)
    assert fits(order, times)
    assert found == least_of_all_orders(times, 4)
    assert found < best_fixed(layout, 4, times)[0]
