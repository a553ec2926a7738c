"""By how much do the clocks of hosts differ? Read off the messages that the ranks exchanged.

A message cannot arrive before it was sent, and a sum cannot end on any rank before every rank has posted it. Between
the clocks of two hosts a and b, with d(a>b) the least "arrival on b's clock minus sending on a's clock" over all their
messages:

    d(a>b) = least delay from a to b + clock of b - clock of a
    clock of b - clock of a = (d(a>b) - d(b>a)) / 2            if the least delays are alike in both directions

after Cristian (1989) and the clock filter of NTP (Mills 1991). The error is at most half of the least round trip
d(a>b) + d(b>a). Hosts are joined into a tree, those with the least round trips first. Drift is left out: a step is
short. Where messages go one way only, the clocks are changed only if a message would arrive before it was sent, and by
no more than that.

Legend: a, b hosts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from lightning_pipe.core.program import Message, Recv, Reduce, Send
from lightning_pipe.core.timeline import Event, Timeline

Delays: TypeAlias = Mapping[tuple[int, int], float]  # host that sent, host that saw it -> least difference of clocks


def clock_offsets(timelines: Sequence[Timeline], *, hosts: Sequence[int]) -> tuple[float, ...]:
    """Return by how many seconds the clock of each rank is ahead of that of rank 0's host.

    Args:
        timelines: recorded timelines of all ranks, one per program that was run.
        hosts: host of each rank; ranks of one host share a clock. Any numbers.
    """
    delays = _least_delays(timelines, hosts)
    offsets = {hosts[0]: 0.0}
    while step := _nearest(delays, offsets):
        known, new = step
        offsets[new] = offsets[known] + _difference(known, new, delays)
    return tuple(offsets.get(host, 0.0) for host in hosts)


def aligned(timeline: Timeline, offsets: Sequence[float]) -> Timeline:
    """Return a timeline on one clock: that of rank 0's host."""

    def shifted(event: Event) -> Event:
        offset = offsets[event.rank]
        return replace(event, start=event.start - offset, end=event.end - offset)

    return Timeline(tuple(shifted(event) for event in timeline.events))


def _least_delays(timelines: Sequence[Timeline], hosts: Sequence[int]) -> Delays:
    least: dict[tuple[int, int], float] = defaultdict(lambda: math.inf)
    for timeline in timelines:
        for sent, seen in [*_messages(timeline), *_sums(timeline)]:
            pair = (hosts[sent.rank], hosts[seen.rank])
            if pair[0] != pair[1]:
                least[pair] = min(least[pair], seen.end - sent.start)
    return dict(least)


def _messages(timeline: Timeline) -> Iterator[tuple[Event, Event]]:
    """Pair the sending of every message with its receiving."""
    sends: dict[tuple[Message, int, int], Event] = {}
    for event in timeline.events:
        if isinstance(event.instruction, Send):
            sends[event.instruction.message, event.rank, event.instruction.peer] = event
    for event in timeline.events:
        if isinstance(event.instruction, Recv):
            sent = sends.get((event.instruction.message, event.instruction.peer, event.rank))
            if sent is not None:
                yield sent, event


def _sums(timeline: Timeline) -> Iterator[tuple[Event, Event]]:
    """Pair the posting of every sum on each rank with its end on every other rank."""
    buckets: dict[int, dict[int, Event]] = defaultdict(dict)
    for event in timeline.events:
        if isinstance(event.instruction, Reduce):
            buckets[event.instruction.bucket].setdefault(event.rank, event)  # of a bucket in pieces the first
    for members in buckets.values():
        yield from ((a, b) for a in members.values() for b in members.values() if a is not b)


def _nearest(delays: Delays, offsets: Mapping[int, float]) -> tuple[int, int] | None:
    """Return the host in the tree and the one outside with the least round trip; None if nothing joins them."""

    def round_trip(pair: tuple[int, int]) -> float:
        there, back = delays.get(pair, math.inf), delays.get((pair[1], pair[0]), math.inf)
        return there + back

    pairs = {pair for a, b in delays for pair in ((a, b), (b, a)) if pair[0] in offsets and pair[1] not in offsets}
    return min(sorted(pairs), key=round_trip, default=None)


def _difference(a: int, b: int, delays: Delays) -> float:
    """Return by how much the clock of host b is ahead of that of host a."""
    there, back = delays.get((a, b)), delays.get((b, a))
    if there is not None and back is not None:
        return (there - back) / 2
    if there is not None:
        return min(0.0, there)
    assert back is not None, "the pair comes from a message"
    return max(0.0, -back)
