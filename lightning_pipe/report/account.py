"""Account of a rank's time: every moment is computing, waiting for something, or the step itself.

Before a compute a rank may stand still, since its compute before (or since the step began):

       last compute      late        transfer       swap     overhead    this compute
    |================|. . . . . . .|- - - - - - -|+ + + + +|~ ~ ~ ~ ~|================|
                                   made          arrived   fetched

    late        until the last of the values that it needs had been made by another rank
    transfer    from then until all of them had arrived: messages on their way that nothing hid
    swap        from then until what had been offloaded was back from the host, and what was to be given up was there
    overhead    although everything was there: posting, loading, other work of the host

A message is on its way from the end of the compute that made it (on the sender's clock, so clocks must be one: see
`report.clocks`) to its arrival. A recorded receive lasts from its posting until the compute that needs it has seen it
arrive, so an arrival while the rank was busy is not seen; it delays nothing and counts as no transfer. The same
definitions hold for simulated and recorded timelines, so the two can be subtracted. A simulated timeline has no
overhead.

After its last compute a rank waits for sums of gradients (`reduction`), then its optimizer steps. What is left until
the last rank ends is `drain`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lightning_pipe.core.effects import OwnWork, effects_of
from lightning_pipe.core.program import AnyCompute, Compute, ComputeKind, Message, Pass, Recv, Step
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.units import format_seconds, format_share

Link: TypeAlias = tuple[int, int]  # stage that sends, stage that receives


@dataclass(frozen=True)
class Gap:
    """The seconds before one compute in which its rank computed nothing.

    Attributes:
        compute: the compute.
        first: whether it is the first of its rank, so that the gap is no part of the rank's own span.
        late: seconds until the values it needs had been made.
        transfer: seconds until they had arrived.
        swap: seconds until what the stage had offloaded was back, and until what was to be given up was on the host.
        overhead: seconds until it started.
        link: where the value came from that was made last; None if the compute needs no message.
    """

    compute: AnyCompute
    first: bool
    late: float
    transfer: float
    swap: float
    overhead: float
    link: Link | None


@dataclass(frozen=True)
class Account:
    """The seconds of one rank in one step; with `drain` they add up to the seconds of the step.

    Attributes:
        rank: the rank.
        computes: seconds of each stage and kind of compute.
        gaps: what happened between its computes, in their order.
        reduction: from the end of its last compute to the optimizer step.
        optimizer: of the optimizer step.
        drain: from its own end to that of the last rank.
    """

    rank: int
    computes: Mapping[tuple[int, ComputeKind], float]
    gaps: tuple[Gap, ...]
    reduction: float
    optimizer: float
    drain: float


def step_interval(timeline: Timeline) -> tuple[float, float]:
    """Return when a step begins and ends: with the first event that is no receive, and with the last end.

    A receive is posted before there is anything to receive, on a rank that may have come early.
    """
    starts = [event.start for event in timeline.events if not isinstance(event.instruction, Recv)]
    return (min(starts), max(event.end for event in timeline.events)) if starts else (0.0, 0.0)


def step_seconds(timeline: Timeline) -> float:
    """Return the seconds of a step (see `step_interval`), so that steps in a row add up to what they take together.

    A step that a rank begins before the step before has ended on another one counts from that end.
    """
    start, end = step_interval(timeline)
    return end - min(max(start, timeline.since), end)


@dataclass(frozen=True)
class Flight:
    """A message on its way: from the end of the compute that made it to its arrival, in seconds."""

    message: Message
    sender: int
    receiver: int
    start: float
    end: float


def flights(timeline: Timeline) -> tuple[Flight, ...]:
    """Return the messages of a timeline of one step, by arrival; one that was late to be seen began with what made it.

    A message whose making is not in the timeline has no seconds.
    """
    messages = _Messages(timeline)
    found = [
        Flight(event.instruction.message, event.instruction.peer, event.rank, messages.made_at(event), event.end)
        for event in timeline.events
        if isinstance(event.instruction, Recv)
    ]
    return tuple(sorted(found, key=lambda flight: flight.end))


def mean_bubble(timeline: Timeline) -> float:
    """Return the mean bubble of the ranks that compute."""
    bubbles = [timeline.bubble(rank) for rank in timeline.ranks if timeline.computes(rank)]
    return sum(bubbles) / len(bubbles) if bubbles else 0.0


def mean_computing(timeline: Timeline) -> float:
    """Return the share of the step, of all ranks together, in which something is computed."""
    seconds = step_seconds(timeline) * len(timeline.ranks)
    return sum(map(timeline.busy, timeline.ranks)) / seconds if seconds else 0.0


def run_facts(timeline: Timeline) -> str:
    """Return seconds of a step, the share in which ranks compute, and the bubble, as a heading."""
    computing, bubble = format_share(mean_computing(timeline), 0), format_share(mean_bubble(timeline))
    return f"{format_seconds(step_seconds(timeline))}, ranks compute {computing} of it, bubble {bubble} of their spans"


def accounts(timeline: Timeline) -> tuple[Account, ...]:
    """Return where the time of every rank goes, for a timeline of one step and one clock."""
    messages = _Messages(timeline)
    lines: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        lines[event.rank].append(event)
    interval = step_interval(timeline)
    return tuple(_account(rank, lines[rank], interval, messages) for rank in sorted(lines))


def _account(rank: int, events: list[Event], interval: tuple[float, float], messages: _Messages) -> Account:
    computes: dict[tuple[int, ComputeKind], float] = defaultdict(float)
    gaps: list[Gap] = []
    start, end = interval
    for event in sorted(events, key=lambda event: event.start):
        if isinstance(event.instruction, AnyCompute):
            gaps.append(messages.gap(event, since=start, first=not gaps))
            computes[event.instruction.stage, event.instruction.kind] += event.end - event.start
            start = event.end
    steps = [event for event in events if isinstance(event.instruction, Step)]
    reduction = sum(max(0.0, step.start - start) for step in steps)
    last = max((step.end for step in steps), default=start)
    optimizer = sum(step.end - step.start for step in steps)
    return Account(rank, dict(computes), tuple(gaps), reduction, optimizer, max(0.0, end - last))


class _Messages:
    """When the messages of each compute were made and had arrived, and when what was offloaded was back."""

    def __init__(self, timeline: Timeline) -> None:
        self._made: dict[tuple[int, int, Pass, int], float] = {}  # rank, stage, direction, micro-batch -> end
        self._received: dict[tuple[int, int, Pass, int], list[Event]] = defaultdict(list)
        self._fetched: dict[tuple[int, int, int], float] = {}  # rank, stage, micro-batch -> end
        self._waited: dict[int, list[float]] = defaultdict(list)  # rank -> ends of own work that kept it busy, rising
        for event in timeline.events:
            match event.instruction:
                case Compute(stage, _, microbatch) as compute if compute.direction is not None:
                    self._made[event.rank, stage, compute.direction, microbatch] = event.end
                case Recv(message, _):
                    use = (event.rank, message.target, message.direction, message.microbatch)
                    self._received[use].append(event)
                case OwnWork() as work if effects_of(work).resource == "compute":  # which may have waited for a copy
                    self._waited[event.rank].append(event.end)
                case OwnWork(stage, microbatch) as work if "I" in effects_of(work).before:
                    self._fetched[event.rank, stage, microbatch] = event.end
                case _:
                    pass

    def gap(self, event: Event, *, since: float, first: bool) -> Gap:
        """Return what happened from `since` until the start of a compute."""
        compute, start = event.instruction, event.start
        assert isinstance(compute, AnyCompute)
        received = self._needed_by(compute, event.rank)
        made, link = max(((self.made_at(receive), _link(receive)) for receive in received), default=(since, None))
        arrived = max((receive.end for receive in received), default=since)
        ready = min(max(made, since), start)
        there = min(max(arrived, ready), start)
        gone = self._gone(event.rank, start)
        back = min(max(self._back(compute, event.rank), gone, there), start)
        return Gap(compute, first, ready - since, there - ready, back - there, start - back, link)

    def _back(self, compute: AnyCompute, rank: int) -> float:
        """Return when what a compute needs from the host was back; minus infinity if it needs nothing from there."""
        if compute.direction != "B":
            return -math.inf
        return self._fetched.get((rank, compute.stage, compute.microbatches[0]), -math.inf)

    def _gone(self, rank: int, now: float) -> float:
        """Return when a rank last gave up what had to be on the host first, if ever, else minus infinity."""
        ends = self._waited[rank]
        number = bisect_right(ends, now)
        return ends[number - 1] if number else -math.inf

    def _needed_by(self, compute: AnyCompute, rank: int) -> list[Event]:
        if compute.direction is None:
            return []
        return self._received.get((rank, compute.stage, compute.direction, compute.microbatches[0]), [])

    def made_at(self, receive: Event) -> float:
        """Return when the compute that made a message ended; a message of a rank without events was made on arrival."""
        assert isinstance(receive.instruction, Recv)
        message, peer = receive.instruction.message, receive.instruction.peer
        return self._made.get((peer, message.source, message.direction, message.microbatch), receive.end)


def _link(receive: Event) -> Link:
    assert isinstance(receive.instruction, Recv)
    return receive.instruction.message.source, receive.instruction.message.target
