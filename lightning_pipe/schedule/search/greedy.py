"""Greedy list scheduling: a free device starts the best compute that leaves memory for the rest.

List scheduling of F, I and W in time, under the memory of every device (`memory_guard`). After the schedule "auto" of
Zero Bubble (Qi, Wan, Huang and Lin, ICLR 2024; in the form of sail-sg's `zb.py`): a free device runs an I, else an F,
else a W if messages leave time for it. Three switches change that, and all their settings are tried:

    ahead      before its first I a device also begins an F that ends after that I could come at the earliest
    forward    F comes before I; otherwise no F is begun that would end after the arrival of an I that is under way
    fill       W is begun also if it would end after the arrival of a message that is under way

Of several stages on a device the one that is furthest comes first, in F the last and in I the first; of W the oldest
micro-batch. The switches are named after what they do here: zb.py has no messages under way, it lays one micro-batch
after another through all stages.

Legend: s stage, m micro-batch, d device.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lightning_pipe.core.program import Compute, ComputeKind, Layout, Options, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.construct.chain_run import chain_makespan
from lightning_pipe.schedule.construct.devices import (
    ROUNDING,
    fits,
    order_of_lines,
    peak_bytes,
    room_of,
    stages_by_device,
)
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.construct.stage_times import ChainTimes
from lightning_pipe.schedule.orders.breadth_first import breadth_first
from lightning_pipe.schedule.orders.controllable_memory import v_half, v_min
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS, gpipe
from lightning_pipe.schedule.orders.hanayo import hanayo
from lightning_pipe.schedule.orders.interleaved import interleaved
from lightning_pipe.schedule.orders.one_f_one_b import one_f_one_b, warmup_depths
from lightning_pipe.schedule.orders.zero_bubble import zb_h1, zb_h2
from lightning_pipe.schedule.orders.zero_bubble_v import zb_v
from lightning_pipe.schedule.search.memory_guard import MemoryGuard
from lightning_pipe.schedule.search.zero_bubble_v_greedy import zb_v_greedy

FIXED = (gpipe, one_f_one_b, interleaved, breadth_first, zb_h1, zb_h2, zb_v, v_half, v_min, hanayo)


def greedy(layout: Layout, microbatches: int, options: Options, times: ChainTimes, /) -> Order:
    """Order as the best of eight list schedules and of the published orders that fit into memory.

    Four devices and six micro-batches, one unit for each of F, I and W, free messages, endless room:

        0 | F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        1 |  . F0 F1 F2  .  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        2 |  .  . F0 F1  . I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        3 |  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    Best is what takes least by `chain_makespan`; of equals what keeps least (here `zb_h1`). Published orders are those
    of `FIXED` that suit the layout, zb_v_greedy, and 1f1b with "pa" and "pb" as far as there is room. So it is never
    worse than these. No rank keeps more than its room, except that a device with less than one micro-batch of all its
    stages needs is taken to have just that: with one stage it then runs F, I and W in turn, as 1F1B with warm-up 1.

    Args:
        layout: ranks of each stage; any stages may share a device.
        microbatches: number of micro-batches, at least 1.
        options: `keep`: most micro-batches that a device may have open at once, from their first F there to their last
            W; by default "room", what memory allows.
        times: of the pipeline.

    Raises:
        ConfigError: if an option is unknown or unreadable, there is no micro-batch, or devices overlap.
    """
    read = read_options(options, schedule="greedy", defaults={"keep": "room"})
    check_microbatches(microbatches)
    limit = _limit(read["keep"], microbatches)
    orders = [
        _Run(layout, microbatches, times, switches=GreedySwitches(*on), limit=limit).order()
        for on in itertools.product((False, True), repeat=3)
    ]
    orders += (
        order
        for order in published_orders(layout, microbatches, times)
        if fits(order, times) and most_open(order) <= limit
    )
    seconds = [chain_makespan(order, layout, times) for order in orders]
    quick = [order for order, s in zip(orders, seconds, strict=True) if s <= min(seconds) * (1 + ROUNDING)]
    return min(quick, key=lambda order: sum(peak_bytes(line, times) for line in order))


def _limit(keep: int | str, microbatches: int) -> int:
    if keep == "room":
        return microbatches
    if isinstance(keep, str) and keep.isdecimal():
        keep = int(keep)
    if not isinstance(keep, int) or keep < 1:
        raise ConfigError(
            f"schedule 'greedy': found keep {keep!r}; expected \"room\" or a number of micro-batches, at least 1"
        )
    return keep


def published_orders(layout: Layout, microbatches: int, times: ChainTimes) -> Iterator[Order]:
    """Yield the orders of published schedules that suit a layout, whether they fit into memory or not."""
    for schedule in FIXED:
        with suppress(ConfigError):  # it is made for layouts of another shape
            yield schedule(layout, microbatches, NO_OPTIONS)
    with suppress(ConfigError):
        yield zb_v_greedy(layout, microbatches, NO_OPTIONS, times)
    for warmup in ("pa", "pb"):
        depths = _within_room(warmup_depths(warmup, layout), layout, times)
        yield one_f_one_b(layout, microbatches, {"warmup": ",".join(map(str, depths))})


def _within_room(wanted: Sequence[int], layout: Layout, times: ChainTimes) -> list[int]:
    """Return depths for which a stage that is alone on its device has room, and that do not grow."""
    rooms = (min(times.room_bytes[rank] for rank in ranks) for ranks in layout.stages)
    most = (
        room * (1 + ROUNDING) / saved if saved else math.inf
        for room, saved in zip(rooms, times.saved_bytes, strict=True)
    )
    depths = (max(1, int(min(depth, limit))) for depth, limit in zip(wanted, most, strict=True))
    return list(itertools.accumulate(depths, min))


def most_open(order: Order) -> int:
    """Return the most micro-batches that a rank has open at once, from their first F to their last W."""
    found = 0
    for line in order:
        left = Counter(c.microbatch for c in line)
        opened: set[int] = set()
        for compute in line:
            opened.add(compute.microbatch)
            found = max(found, len(opened))
            left[compute.microbatch] -= 1
            if not left[compute.microbatch]:
                opened.remove(compute.microbatch)
    return found


@dataclass(frozen=True)
class GreedySwitches:
    """What a free device does, as described above."""

    ahead: bool
    forward: bool
    fill: bool


class _Run:
    """One list schedule: clocks, messages and memory while it runs."""

    def __init__(
        self, layout: Layout, microbatches: int, times: ChainTimes, *, switches: GreedySwitches, limit: int
    ) -> None:
        held = stages_by_device(layout, schedule="greedy")
        self._devices, self._held = list(held), list(held.values())
        self._at = {s: d for d, stages in enumerate(self._held) for s in stages}
        self._stages, self._count = len(layout.stages), microbatches
        self._times, self._on = times, switches
        self._done: dict[ComputeKind, list[int]] = {kind: [0] * self._stages for kind in ("F", "I", "W")}
        self._arrival = {Compute(0, "F", m): 0.0 for m in range(microbatches)}
        self._lines: list[list[Compute]] = [[] for _ in held]
        self._free = [0.0] * len(held)
        self._events = [(0.0, d) for d in range(len(held))]  # when a device may find something to do
        self._stores = [
            MemoryGuard(stages, times, room=room_of(device, times), limit=limit) for device, stages in held.items()
        ]
        self._first = _first_inputs(self._held, times)

    def order(self) -> Order:
        """Run to the end; return what ran on every rank."""
        while self._events:
            now, d = heapq.heappop(self._events)
            compute = self._choice(d, now) if self._free[d] <= now else None
            if compute is not None:
                self._start(compute, d, now)
        ends = [self._count] * self._stages
        assert all(done == ends for done in self._done.values()), "what is begun can be finished"
        return order_of_lines(dict(zip(self._devices, self._lines, strict=True)))

    def _start(self, compute: Compute, d: int, now: float) -> None:
        end = now + self._times.compute_s(compute)
        self._lines[d].append(compute)
        self._done[compute.kind][compute.stage] += 1
        self._stores[d].put(compute)
        self._free[d] = end
        heapq.heappush(self._events, (end, d))
        taker = _taker(compute, self._stages)
        if taker is not None:
            away = taker.stage != compute.stage
            arrival = end + (self._times.message_s(compute.stage, taker.stage) if away else 0.0)
            self._arrival[taker] = arrival
            heapq.heappush(self._events, (arrival, self._at[taker.stage]))

    def _choice(self, d: int, now: float) -> Compute | None:
        """Return what a free device starts now, or None if it waits for the next event."""
        coming = [(self._arrival[c], c) for c in (*self._nexts("F", d), *self._nexts("I", d)) if c in self._arrival]
        forwards = [c for at, c in coming if at <= now and c.kind == "F"]
        inputs = [c for at, c in coming if at <= now and c.kind == "I"]
        later = [(at, c) for at, c in coming if at > now]
        awaited = min((at for at, c in later if c.kind == "I"), default=math.inf)
        wanted = [f for f in forwards if self._is_timely(f, d, now, awaited)]
        best = next(iter((*wanted, *inputs) if self._on.forward else (*inputs, *wanted)), None)
        return best or self._weight(d, now, min((at for at, _ in later), default=math.inf))

    def _nexts(self, kind: ComputeKind, d: int) -> Iterator[Compute]:
        """Yield the next compute of every stage for which there is room, that of the furthest stage first."""
        for s in self._held[d] if kind == "I" else reversed(self._held[d]):
            m = self._done[kind][s]
            if m < self._count and self._stores[d].has_room(compute := Compute(s, kind, m)):
                yield compute

    def _is_timely(self, forward: Compute, d: int, now: float, awaited: float) -> bool:
        """Return whether a forward may be begun in view of the input gradients that are to come."""
        if forward.microbatch == 0:  # nothing comes before it has gone all the way
            return True
        end = now + self._times.compute_s(forward)
        if any(self._done["I"][s] for s in self._held[d]):
            return self._on.forward or end <= awaited
        return self._on.ahead or end <= self._first[d] * (1 + ROUNDING)

    def _weight(self, d: int, now: float, message: float) -> Compute | None:
        """Return the oldest weight gradient, unless it is better to wait for a message."""
        done = self._done
        waiting = [Compute(s, "W", done["W"][s]) for s in self._held[d] if done["W"][s] < done["I"][s]]
        oldest = min(waiting, key=lambda c: (c.microbatch, -c.stage), default=None)
        is_wanted = oldest is not None and (self._on.fill or now + self._times.compute_s(oldest) <= message)
        return oldest if is_wanted else None


def _taker(compute: Compute, stages: int) -> Compute | None:
    """Return the compute that takes what a compute hands on."""
    s, m = compute.stage, compute.microbatch
    match compute.kind:
        case "F":
            return Compute(s + 1, "F", m) if s + 1 < stages else Compute(s, "I", m)
        case "I" | "B":
            return Compute(s - 1, "I", m) if s else None
        case "W":
            return None


def _first_inputs(held: Sequence[Sequence[int]], times: ChainTimes) -> list[float]:
    """Return for every device when its first input gradient can come at the earliest."""
    count = len(times.forward_s)
    now = sum(times.forward_s) + sum(times.ahead_s)
    arrivals = [0.0] * count
    for s in reversed(range(count)):
        arrivals[s] = now
        now += times.input_s[s] + (times.back_s[s - 1] if s else 0.0)
    return [min(arrivals[s] for s in stages) for stages in held]
