"""How much memory do the ranks use, and when? The bytes of a timeline, by what they are for.

    state       parameters, their gradients, optimizer state, buffers of the module: always
    held        saved, from the start of F to the end of I (or B), except what is offloaded from the end of Evict to the
                start of Fetch; kept, from the end of I to Free
    buffers     results of the step, from the start of F to the end; a receive, from the moment that the rank's list
                posts it to the compute that takes it; what was sent, from the compute that made it until the message
                has arrived; what one stage hands to another on the same rank, between their computes; gradients being
                reduced, from `Reduce` to `Step`
    workspace   of each compute, while it runs

Gradients of parameters are in the state from the beginning. What the first backward of a stage makes becomes these
gradients; what later ones make is memory beside them, until it is added. So the curve holds for a batch that begins
without gradients.

What is sent and saved counts in both places, and so does what two stages of one rank keep of what one handed to the
other. Events of no length use no memory.

Legend: s stage, m micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, get_args

from lightning_pipe.core.prices import Prices
from lightning_pipe.core.program import (
    Compute,
    ComputeKind,
    Evict,
    Fetch,
    Free,
    Message,
    Program,
    Recv,
    Reduce,
    Samples,
    Send,
    Step,
)
from lightning_pipe.core.timeline import Event, Timeline

Series = Literal["held", "buffers", "workspace", "in_flight"]

_BACKWARD: tuple[ComputeKind, ...] = ("I", "B")


@dataclass(frozen=True)
class MemoryCurve:
    """What one rank uses over time.

    Attributes:
        times: seconds at which an amount changes, rising.
        held_bytes: bytes kept for backward computes from each of these times on.
        buffer_bytes: bytes of results, messages and reductions from each of these times on.
        workspace_bytes: bytes that the running compute needs beside them from each of these times on.
        in_flight: micro-batches (of all stages of the rank together) kept from each of these times on.
        state_bytes: bytes that are always there.
    """

    times: tuple[float, ...]
    held_bytes: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    state_bytes: int = 0

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """Return all bytes, with the state, from each of the times on."""
        series = zip(self.held_bytes, self.buffer_bytes, self.workspace_bytes, strict=True)
        return tuple(self.state_bytes + sum(parts) for parts in series)

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes held at once."""
        return max(self.held_bytes, default=0)

    @property
    def peak_total_bytes(self) -> int:
        """Return the most bytes used at once, with the state."""
        return max(self.total_bytes, default=self.state_bytes)

    @property
    def peak_in_flight(self) -> int:
        """Return the most micro-batches kept at once."""
        return max(self.in_flight, default=0)


def memory_curves(timeline: Timeline, *, program: Program, prices: Prices) -> tuple[MemoryCurve, ...]:
    """Return what every rank uses over time.

    Args:
        timeline: simulated or recorded times of the program.
        program: the program, for the samples of each replica and for where receives are posted.
        prices: bytes of its parts.
    """
    arrivals = {
        (event.rank, event.instruction.message): event.end
        for event in timeline.events
        if isinstance(event.instruction, Recv)
    }
    first = min((event.start for event in timeline.events), default=0.0)
    events: list[list[Event]] = [[] for _ in program.ranks]
    for event in timeline.events:
        events[event.rank].append(event)
    return tuple(
        _curve(_Rank(rank, own, program, prices).uses(arrivals, first=first), prices.state_bytes(rank))
        for rank, own in enumerate(events)
    )


@dataclass(frozen=True)
class _Use:
    """An amount that a rank uses from `begin` to `end`."""

    series: Series
    begin: float
    end: float
    amount: int


def _curve(uses: Iterable[_Use], state_bytes: int) -> MemoryCurve:
    changes: dict[tuple[float, bool], dict[Series, int]] = defaultdict(lambda: dict.fromkeys(get_args(Series), 0))
    for use in uses:
        if use.amount and use.begin < use.end:
            changes[use.begin, True][use.series] += use.amount
            changes[use.end, False][use.series] -= use.amount
    moments = sorted(changes)  # what ends at a time makes room for what begins then

    def series(name: Series) -> tuple[int, ...]:
        return tuple(accumulate(changes[moment][name] for moment in moments))

    times = tuple(time for time, _ in moments)
    return MemoryCurve(
        times, series("held"), series("buffers"), series("workspace"), series("in_flight"), state_bytes=state_bytes
    )


class _Rank:
    """What one rank uses."""

    def __init__(self, rank: int, events: Sequence[Event], program: Program, prices: Prices) -> None:
        self._rank, self._program, self._prices = rank, program, prices
        self._line = program.ranks[rank]
        self._events = {event.instruction: event for event in events}
        self._last = max((event.end for event in self._events.values()), default=0.0)

    def uses(self, arrivals: Mapping[tuple[int, Message], float], *, first: float) -> Iterator[_Use]:
        """Yield every use.

        Args:
            arrivals: when messages have arrived: (receiver, message) -> time.
            first: when the timeline begins.
        """
        now = first
        done: set[tuple[int, ComputeKind]] = set()
        for instruction in self._line:
            match instruction:
                case Compute(stage, kind, _):
                    event = self._events[instruction]
                    yield from self._held(event) if kind == "F" else ()
                    yield self._workspace(event, is_first=(stage, kind) not in done)
                    done.add((stage, kind))
                    now = event.end
                case Recv(message, _):
                    taken = self._event(message.target, _takers(message), message.microbatch)
                    yield _Use("buffers", now, taken.start, self._prices.message_bytes(message))
                case Send(message, peer):
                    gone = max(self._events[instruction].end, arrivals[peer, message])
                    yield _Use("buffers", now, gone, self._prices.message_bytes(message))
                case Reduce(bucket):
                    step = self._events.get(Step())
                    end = step.start if step is not None else self._last
                    yield _Use("buffers", now, end, self._program.traffic.buckets[bucket].bytes)
                case _:
                    pass
        yield from self._handed_over()

    def _held(self, forward: Event) -> Iterator[_Use]:
        """Yield what a forward leaves."""
        stage, microbatch, samples = self._identity(forward)
        saved, kept = self._prices.saved_bytes(stage, samples), self._prices.kept_bytes(stage, samples)
        end = self._events[Free(stage, microbatch)].start
        backward = self._find(stage, _BACKWARD, microbatch)
        change = backward.end if backward is not None else end
        evict, fetch = (self._events.get(kind(stage, microbatch)) for kind in (Evict, Fetch))
        if evict is not None and fetch is not None:
            offloaded = self._prices.offloaded_bytes(stage, samples)
            yield _Use("held", forward.start, evict.end, offloaded)
            yield _Use("held", fetch.start, change, offloaded)
            saved -= offloaded
        yield _Use("held", forward.start, end, min(saved, kept))
        yield _Use("held", forward.start, change, saved - min(saved, kept))
        yield _Use("held", change, end, kept - min(saved, kept))
        yield _Use("buffers", forward.start, self._last, self._prices.result_bytes(stage, samples))
        yield _Use("in_flight", forward.start, end, 1)

    def _workspace(self, event: Event, *, is_first: bool) -> _Use:
        compute = event.instruction
        assert isinstance(compute, Compute)
        _, _, samples = self._identity(event)
        amount = self._prices.workspace_bytes(compute, samples)
        taken_over = self._prices.gradient_bytes(compute) if is_first else 0
        return _Use("workspace", event.start, event.end, max(0, amount - taken_over))

    def _handed_over(self) -> Iterator[_Use]:
        """Yield what one stage of the rank hands to another, without a message."""
        held = {s for s, ranks in enumerate(self._program.layout.stages) if self._rank in ranks}
        for edge in self._program.traffic.edges:
            if not held.issuperset((edge.source, edge.target)):
                continue
            for microbatch in range(len(self._program.sizes)):
                samples = self._samples(edge.source, microbatch) & self._samples(edge.target, microbatch)
                message = Message(edge.direction, edge.source, edge.target, microbatch, samples)
                made = self._find(edge.source, _takers(message), microbatch)
                taken = self._find(edge.target, _takers(message), microbatch)
                if samples and made is not None and taken is not None:
                    yield _Use("buffers", made.end, taken.start, self._prices.message_bytes(message))

    def _identity(self, event: Event) -> tuple[int, int, int]:
        """Return stage, micro-batch and number of samples of a compute."""
        compute = event.instruction
        assert isinstance(compute, Compute)
        return compute.stage, compute.microbatch, len(self._samples(compute.stage, compute.microbatch))

    def _samples(self, stage: int, microbatch: int) -> Samples:
        ranks = self._program.layout.stages[stage]
        if self._rank not in ranks:
            return Samples(0, 0)
        size = self._program.sizes[microbatch]
        return self._program.layout.samples(stage, ranks.index(self._rank), microbatch, size)

    def _find(self, stage: int, kinds: tuple[ComputeKind, ...], microbatch: int) -> Event | None:
        found = (self._events.get(Compute(stage, kind, microbatch)) for kind in kinds)
        return next((event for event in found if event is not None), None)

    def _event(self, stage: int, kinds: tuple[ComputeKind, ...], microbatch: int) -> Event:
        found = self._find(stage, kinds, microbatch)
        assert found is not None, f"a verified program takes what it receives: stage {stage}, {kinds}, {microbatch}"
        return found


def _takers(message: Message) -> tuple[ComputeKind, ...]:
    """Return the kinds of computes that make, and that take, the values of a message."""
    return ("F",) if message.direction == "F" else _BACKWARD
