"""Copies to the host placed in the line of a device that has too little room for it: what is needed last leaves first.

After Belady (IBM Systems Journal 1966), whose rule is optimal for caches: where the next compute does not fit, the
micro-batch goes whose I comes last of all that are there. Its memory is given up right before that compute, so that the
copy has had all the time there was; it comes back `AHEAD` computes before its I, or as soon as there is room.

Longer warm-up asks for more room, and copies for time; so orders are tried that `greedy` makes for more and more room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_pipe.core.program import Compute, CopyingOrder, Fetch, HostCopy, Layout, Order, Vacate
from lightning_pipe.schedule.construct.devices import ROUNDING, bytes_of, peak_bytes
from lightning_pipe.schedule.construct.stage_times import ChainTimes
from lightning_pipe.schedule.lower.offload import AHEAD
from lightning_pipe.schedule.rules import halves
from lightning_pipe.schedule.search.greedy import greedy

_MORE = 4  # micro-batches by which there is more room, at most

Placed = Compute | HostCopy
Work = tuple[int, int]  # stage, micro-batch


def copying_orders(layout: Layout, microbatches: int, times: ChainTimes) -> Iterator[CopyingOrder]:
    """Yield orders with copies that fit, for more and more warm-up; none where no stage can offload.

    Args:
        layout: ranks of each stage.
        microbatches: number of micro-batches, at least 1.
        times: of the pipeline, with what its stages can offload and the room of every rank.
    """
    if not any(times.copied_bytes):
        return
    largest = max(times.copied_bytes)
    for more in range(1, _MORE + 1):
        roomy = replace(times, room_bytes=tuple(room + more * largest for room in times.room_bytes))
        found = with_copies(greedy(layout, microbatches, {}, roomy), times)
        if found is not None:
            yield found


def with_copies(order: Order, times: ChainTimes) -> CopyingOrder | None:
    """Return an order with the copies that it needs to fit; None where copies do not suffice."""
    lines: list[tuple[Placed, ...]] = []
    for line, room in zip(order, times.room_bytes, strict=True):
        placed = _placed([half for compute in line for half in halves(compute)], times, room * (1 + ROUNDING))
        if placed is None:
            return None
        lines.append(tuple(_early(placed, times, room * (1 + ROUNDING))))
    return tuple(lines)


def _placed(line: Sequence[Compute], times: ChainTimes, room: float) -> list[Placed] | None:
    """Return a line with copies that come back right before they are needed; None if it does not fit even so."""
    needed = {(c.stage, c.microbatch): i for i, c in enumerate(line) if c.kind == "I"}
    there, away = set[Work](), set[Work]()
    found: list[Placed] = []
    held = 0.0
    for compute in line:
        work = (compute.stage, compute.microbatch)
        coming = [Fetch(*work)] if compute.kind == "I" and work in away else []
        while held + sum(bytes_of(c, times) for c in coming) + max(0.0, bytes_of(compute, times)) > room:
            victims = [w for w in there if times.copied_bytes[w[0]] and w != work]
            if not victims:
                return None
            victim = max(victims, key=lambda w: needed[w])
            there.remove(victim)
            away.add(victim)
            found.append(Vacate(*victim))
            held += bytes_of(found[-1], times)
        found += [*coming, compute]
        held += sum(bytes_of(c, times) for c in coming) + bytes_of(compute, times)
        if compute.kind == "F":
            there.add(work)
        if compute.kind == "I":
            there.discard(work)
            away.discard(work)
    return found


def _early(line: list[Placed], times: ChainTimes, room: float) -> list[Placed]:
    """Return a line whose copies come back up to `AHEAD` computes sooner, as far as there is room."""
    for fetch in [one for one in line if isinstance(one, Fetch)]:
        position, passed = line.index(fetch), 0
        while position and passed < AHEAD:
            before = line[position - 1]
            if isinstance(before, Fetch) or before == Vacate(*(fetch.stage, fetch.microbatch)):
                break
            moved = [*line[: position - 1], fetch, before, *line[position + 1 :]]
            if peak_bytes(moved, times) > room:
                break
            line, position = moved, position - 1
            passed += isinstance(before, Compute)
    return line
