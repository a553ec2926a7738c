"""Clock offsets between hosts, read off the messages and sums that the ranks recorded.

A message cannot arrive before it was sent. Between the clocks of two hosts a and b, with d(a>b) the least "arrival on
b's clock minus sending on a's clock" over all their messages:

    d(a>b) = least delay from a to b + clock of b - clock of a
    clock of b - clock of a = (d(a>b) - d(b>a)) / 2            if the least delays are alike in both directions

after Cristian (1989) and the clock filter of NTP (Mills 1991). The error is at most half of the least round trip
d(a>b) + d(b>a). Hosts are joined into a tree, those with the least round trips first; then by sums; then by messages
that go one way only:

    sums        the last sum that two hosts share ends on both at once, as both wait for it before their step
    one way     clocks are changed only if a message would arrive before it was sent, and by no more than that

Drift is left out: a step is short.

Legend: a, b hosts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import median
from typing import TypeAlias

from lightning_pipe.core.program import Message, Recv, Reduce, Send
from lightning_pipe.core.timeline import Event, Timeline

Pair: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class _Signs:
    """What tells about two clocks, by ordered pair of hosts (a, b).

    Attributes:
        delays: least arrival on b minus sending on a.
        ends: ends of sums on b minus those on a.
    """

    delays: Mapping[Pair, float]
    ends: Mapping[Pair, Sequence[float]]

    def round_trip(self, pair: Pair) -> float:
        """Return the least seconds from a to b and back, infinite if messages go one way only."""
        return self.delays.get(pair, math.inf) + self.delays.get((pair[1], pair[0]), math.inf)

    def doubt(self, pair: Pair) -> tuple[bool, bool, float]:
        """Return how little a pair is to be believed."""
        round_trip = self.round_trip(pair)
        return math.isinf(round_trip), pair not in self.ends, round_trip

    def difference(self, a: int, b: int) -> float:
        """Return by how much the clock of host b is ahead of that of host a."""
        there, back = self.delays.get((a, b), math.inf), self.delays.get((b, a), math.inf)
        if math.isfinite(there + back):
            return (there - back) / 2
        if (a, b) in self.ends:
            return median(self.ends[a, b])
        return min(0.0, there) if math.isfinite(there) else max(0.0, -back)


def clock_offsets(timelines: Sequence[Timeline], *, hosts: Sequence[int]) -> tuple[float, ...]:
    """Return by how many seconds the clock of each rank is ahead of that of rank 0's host.

    A host that shares no message or sum with the others keeps its clock.

    Args:
        timelines: recorded timelines of all ranks, one per program that was run.
        hosts: host of each rank; ranks of one host share a clock. Any numbers.
    """
    signs = _signs(timelines, hosts)
    offsets = {hosts[0]: 0.0}
    while pair := _nearest(signs, offsets):
        known, new = pair
        offsets[new] = offsets[known] + signs.difference(known, new)
    return tuple(offsets.get(host, 0.0) for host in hosts)


def aligned(timeline: Timeline, offsets: Sequence[float]) -> Timeline:
    """Return a timeline on one clock: that of rank 0's host."""

    def shifted(event: Event) -> Event:
        offset = offsets[event.rank]
        return replace(event, start=event.start - offset, end=event.end - offset)

    return Timeline(tuple(shifted(event) for event in timeline.events))


def _nearest(signs: _Signs, offsets: Mapping[int, float]) -> Pair | None:
    """Return the most believable pair of a host in the tree and one outside; None if nothing joins them."""
    pairs = {pair for a, b in (*signs.delays, *signs.ends) for pair in ((a, b), (b, a))}
    leaving = sorted(pair for pair in pairs if pair[0] in offsets and pair[1] not in offsets)
    return min(leaving, key=signs.doubt, default=None)


def _signs(timelines: Sequence[Timeline], hosts: Sequence[int]) -> _Signs:
    delays: dict[Pair, float] = {}
    ends: dict[Pair, list[float]] = defaultdict(list)
    for timeline in timelines:
        for sent, received in _messages(timeline):
            pair = (hosts[sent.rank], hosts[received.rank])
            if pair[0] != pair[1]:
                delays[pair] = min(delays.get(pair, math.inf), received.end - sent.start)
        for here, there in _last_sums(timeline):
            if hosts[here.rank] != hosts[there.rank]:
                ends[hosts[here.rank], hosts[there.rank]].append(there.end - here.end)
    return _Signs(delays, dict(ends))


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


def _last_sums(timeline: Timeline) -> Iterator[tuple[Event, Event]]:
    """Pair the ends of the last sum that two ranks share, in both orders."""
    sums: dict[int, dict[int, Event]] = defaultdict(dict)  # bucket -> rank -> its last piece
    for event in timeline.events:
        if isinstance(event.instruction, Reduce):
            known = sums[event.instruction.bucket].get(event.rank, event)
            sums[event.instruction.bucket][event.rank] = max(known, event, key=lambda piece: piece.end)
    last: dict[Pair, tuple[Event, Event]] = {}
    for _, members in sorted(sums.items()):
        last.update({(a, b): (members[a], members[b]) for a, b in permutations(members, 2)})
    yield from last.values()
