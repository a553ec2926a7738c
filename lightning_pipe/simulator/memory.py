"""Memory curves of a timeline: bytes per rank over time, by what they are for.

    state       parameters, their gradients, optimizer state, buffers of the module: always
    held        saved, from the start of F to the end of I (or B); kept, from the end of I to Free; what own work holds
                or gives up by its effects (`core.effects`), until the end of I (or B): offloaded bytes are away from
                the end of VACATE until the rank's list posts FETCH, which allocates them
    buffers     results of the step, from the start of F to the end; a receive, from the moment that the rank's list
                posts it to the compute that takes it; what was sent, from the compute that made it until the message
                has arrived; what one stage hands to another on the same rank, between their computes; the largest piece
                in which gradients are summed, while pieces are put together: gradients are in them from then on; what
                the head alone reads of a micro-batch, from F to the head; what the head makes of a micro-batch, from
                the head to the end of I (or B)
    workspace   of each compute, of the head (what it puts together), and of the optimizer's step, while it runs; that
                of a joined W is what it needs beside what is kept of all its micro-batches, which counts until they are
                freed

Gradients of parameters are in the state from the beginning. What the first backward of a stage makes becomes these
gradients; what later ones make is memory beside them, until it is added. So the curve holds for a batch that begins
without gradients.

What is sent to several stages counts once, until the last has it. What is sent and saved counts in both places, and so
does what two stages of one rank keep of what one handed to the other. Events of no length use no memory.

In a round (`core.program.Seam`) what earlier rounds left is there from its beginning, and what it leaves until its end.

Legend: s stage, m micro-batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias, get_args

from typing_extensions import assert_never

from lightning_pipe.core.effects import OwnWork, effects_of
from lightning_pipe.core.milestones import Head, Milestone
from lightning_pipe.core.prices import Prices
from lightning_pipe.core.program import (
    AnyCompute,
    ComputeKind,
    Free,
    Instruction,
    Message,
    Pass,
    Program,
    Recv,
    Reduce,
    Samples,
    Send,
    Step,
)
from lightning_pipe.core.timeline import Event, Timeline

Series = Literal["held", "buffers", "workspace", "in_flight"]
Move: TypeAlias = tuple[Pass, int, int, int, int, int]  # direction, stages, micro-batch, sender, receiver of a message

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
    first = min((event.start for event in timeline.events), default=0.0)
    moved: dict[Move, float] = {}
    events: list[list[Event]] = [[] for _ in program.ranks]
    for event in timeline.events:
        match event.instruction:
            case Send(message, peer):
                move = _move(message, event.rank, peer)
                moved[move] = max(event.end, moved.get(move, event.end))
            case Recv(message, peer):
                move = _move(message, peer, event.rank)
                moved[move] = max(event.end, moved.get(move, event.end))
            case _:
                events[event.rank].append(event)
    lasts = [max((event.end for event in own), default=0.0) for own in events]
    for (*_, sender, receiver), end in moved.items():
        lasts[sender], lasts[receiver] = max(lasts[sender], end), max(lasts[receiver], end)
    return tuple(
        _curve(_Rank(rank, own, lasts[rank], program, prices).uses(moved, first=first), prices.state_bytes(rank))
        for rank, own in enumerate(events)
    )


def _move(message: Message, sender: int, receiver: int) -> Move:
    return message.direction, message.source, message.target, message.microbatch, sender, receiver


class _Use(NamedTuple):
    """An amount that a rank uses from `begin` to `end`."""

    series: Series
    begin: float
    end: float
    amount: int


def _curve(uses: Iterable[_Use], state_bytes: int) -> MemoryCurve:
    places = {name: place for place, name in enumerate(get_args(Series))}
    begun: dict[float, list[int]] = defaultdict(lambda: [0] * len(places))
    ended: dict[float, list[int]] = defaultdict(lambda: [0] * len(places))
    for name, begin, end, amount in uses:
        if amount and begin < end:
            begun[begin][places[name]] += amount
            ended[end][places[name]] -= amount
    moments = [  # what ends at a time makes room for what begins then
        (time, changes[time])
        for time in sorted(begun.keys() | ended.keys())
        for changes in (ended, begun)
        if time in changes
    ]

    def series(name: Series) -> tuple[int, ...]:
        place = places[name]
        return tuple(accumulate(amounts[place] for _, amounts in moments))

    times = tuple(time for time, _ in moments)
    return MemoryCurve(
        times, series("held"), series("buffers"), series("workspace"), series("in_flight"), state_bytes=state_bytes
    )


@dataclass(frozen=True)
class _Amounts:
    """Bytes of one micro-batch of a stage on a rank."""

    saved: int
    kept: int
    results: int


class _Rank:
    """What one rank uses.

    Args:
        rank: its number.
        events: its events, but those of messages.
        last: when the last of all its events ends.
        program: the program.
        prices: bytes of its parts.
    """

    def __init__(self, rank: int, events: Sequence[Event], last: float, program: Program, prices: Prices) -> None:
        self._rank, self._last, self._program, self._prices = rank, last, program, prices
        self._line = program.ranks[rank]
        self._replica = {s: ranks.index(rank) for s, ranks in enumerate(program.layout.stages) if rank in ranks}
        self._computes: dict[tuple[int, ComputeKind, int], Event] = {}
        self._others: dict[Instruction, Event] = {}
        for event in events:
            match event.instruction:
                case AnyCompute() as compute:
                    self._computes |= {(compute.stage, compute.kind, m): event for m in compute.microbatches}
                case other:
                    self._others[other] = event
        self._amounts: dict[tuple[int, int], _Amounts] = {}
        self._workspaces: dict[tuple[int, ComputeKind, int, int], int] = {}

    def uses(self, moved: Mapping[Move, float], *, first: float) -> Iterator[_Use]:
        """Yield every use.

        Args:
            moved: when messages have left their sender and have arrived.
            first: when the timeline begins.
        """
        now = first
        done: set[tuple[int, ComputeKind]] = set()
        sent: dict[tuple[int, Pass, int], list[tuple[int, _Use]]] = defaultdict(list)
        along: list[int] = []  # buckets that are summed along with the next compute
        for instruction in self._line:
            match instruction:
                case AnyCompute():
                    stage, kind, microbatch = instruction.stage, instruction.kind, instruction.microbatches[0]
                    event = self._computes[stage, kind, microbatch]
                    if kind == "F":
                        yield from self._in_flight(stage, microbatch, event.start)
                    yield self._workspace(instruction, event, is_first=(stage, kind) not in done)
                    while along:
                        yield _Use("buffers", event.start, event.end, self._piece_bytes(along.pop()))
                    done.add((stage, kind))
                    now = event.end
                case Recv(message, _):
                    taken = self._find(message.target, _takers(message), message.microbatch)
                    end = self._last if taken is None else taken.start  # a later round takes it
                    yield _Use("buffers", now, end, self._prices.message_bytes(message))
                case Send(message, peer):
                    gone = moved[_move(message, self._rank, peer)]
                    size = self._prices.message_bytes(message)
                    use = _Use("buffers", now, gone, size)
                    sent[message.source, message.direction, message.microbatch].append((message.target, use))
                case Reduce(bucket):
                    if instruction.along:
                        along.append(bucket)
                    else:
                        yield _Use("buffers", now, math.nextafter(now, math.inf), self._piece_bytes(bucket))
                case Step():
                    step = self._others[instruction]
                    end = max(step.end, math.nextafter(step.start, math.inf))  # steps count where they take no time
                    yield _Use("workspace", step.start, end, self._prices.step_bytes(self._rank))
                case OwnWork():
                    if effects_of(instruction).resource == "compute":
                        now = max(now, self._others[instruction].end)
                    yield from self._own_work(instruction, now)
                case Head():
                    head = self._others[instruction]
                    samples = sum(self._program.sizes)
                    needs = self._program.traffic.head_bytes(samples) + self._prices.head_workspace_bytes(samples)
                    yield _Use("workspace", head.start, max(head.end, math.nextafter(head.start, math.inf)), needs)
                    yield from self._of_head(head)
                    now = head.end
                case Milestone():
                    pass  # what taking a step back needs belongs to the state of the optimizer
                case _:
                    assert_never(instruction)
        for values, uses in sent.items():
            yield from self._shared(*values, uses)
        yield from self._handed_over()
        yield from self._entering(first)

    def _piece_bytes(self, bucket: int) -> int:
        return self._prices.piece_bytes(self._program.traffic.buckets[bucket])

    def _shared(self, stage: int, direction: Pass, microbatch: int, sent: Sequence[tuple[int, _Use]]) -> Sequence[_Use]:
        """Return the uses of messages of one compute; what several of them carry is there once, until the last ends."""
        uses = [use for _, use in sent]
        if len({target for target, _ in sent}) < 2:
            return uses
        limit = self._prices.sent_bytes(stage, direction, len(self._samples(stage, microbatch)))
        counted = 0
        shared = []
        for use in sorted(uses, key=lambda use: use.end, reverse=True):
            shared.append(use._replace(amount=min(use.amount, limit - counted)))
            counted += shared[-1].amount
        return shared

    def _own_work(self, instruction: OwnWork, now: float) -> Iterator[_Use]:
        """Yield what own work holds from its place in the list on, or gives up from its end on, until the backward."""
        sign = effects_of(instruction).bytes
        if not sign:
            return
        stage, microbatch = instruction.stage, instruction.microbatch
        samples = len(self._samples(stage, microbatch))
        user = self._find(stage, _BACKWARD, microbatch)
        assert user is not None, f"a verified program has a backward after own work that changes memory: {instruction}"
        begin = now if sign > 0 else self._others[instruction].end
        yield _Use("held", begin, user.end, sign * self._prices.own_work_bytes(instruction, self._rank, samples))

    def _in_flight(self, stage: int, microbatch: int, begin: float) -> Iterator[_Use]:
        """Yield what a micro-batch keeps from a time on, until it is freed or the round ends."""
        amounts = self._amounts_of(stage, len(self._samples(stage, microbatch)))
        saved, kept = amounts.saved, amounts.kept
        free = self._others.get(Free(stage, microbatch))
        end = self._last if free is None else free.start
        backward = self._find(stage, _BACKWARD, microbatch)
        change = backward.end if backward is not None else end
        yield _Use("held", begin, end, min(saved, kept))
        yield _Use("held", begin, change, saved - min(saved, kept))
        yield _Use("held", change, end, kept - min(saved, kept))
        yield _Use("buffers", begin, self._last, amounts.results)
        yield _Use("in_flight", begin, end, 1)

    def _of_head(self, head: Event) -> Iterator[_Use]:
        """Yield what the head takes of micro-batches, and what it makes for them."""
        traffic, stage = self._program.traffic, len(self._program.layout.stages) - 1
        for microbatch in range(len(self._program.sizes)):
            forward, backward = (self._find(stage, kinds, microbatch) for kinds in (("F",), _BACKWARD))
            if forward is None:
                continue
            reads, makes = self._prices.head_bytes(len(self._samples(stage, microbatch)))
            yield _Use("buffers", forward.start, head.end, reads)
            if backward is not None and traffic.head is not None and traffic.head.holds_backwards:
                yield _Use("buffers", head.end, backward.end, makes)

    def _entering(self, first: float) -> Iterator[_Use]:
        """Yield what earlier rounds left: forwards in flight, and messages that nobody has taken yet."""
        seam = self._program.seam
        if seam is None:
            return
        for stage in self._replica:
            for microbatch in range(seam.enters[stage]):
                if self._samples(stage, microbatch):
                    yield from self._in_flight(stage, microbatch, first)
            for edge in self._program.traffic.edges:
                if edge.direction == "F" and edge.target == stage:
                    for microbatch in range(seam.enters[stage], seam.enters[edge.source]):
                        message = Message("F", edge.source, stage, microbatch, self._samples(stage, microbatch))
                        taken = self._find(stage, ("F",), microbatch)
                        end = self._last if taken is None else taken.start
                        if message.samples:
                            yield _Use("buffers", first, end, self._prices.message_bytes(message))

    def _amounts_of(self, stage: int, samples: int) -> _Amounts:
        key = (stage, samples)
        if key not in self._amounts:
            prices = self._prices
            self._amounts[key] = _Amounts(
                prices.saved_bytes(stage, samples),
                prices.kept_bytes(stage, samples),
                prices.result_bytes(stage, samples),
            )
        return self._amounts[key]

    def _workspace(self, compute: AnyCompute, event: Event, *, is_first: bool) -> _Use:
        samples = sum(len(self._samples(compute.stage, microbatch)) for microbatch in compute.microbatches)
        key = (compute.stage, compute.kind, samples, len(compute.microbatches))
        if key not in self._workspaces:
            self._workspaces[key] = self._prices.workspace_bytes(compute, samples)
        taken_over = self._prices.gradient_bytes(compute, samples) if is_first else 0
        return _Use("workspace", event.start, event.end, max(0, self._workspaces[key] - taken_over))

    def _handed_over(self) -> Iterator[_Use]:
        """Yield what one stage of the rank hands to another, without a message."""
        for edge in self._program.traffic.edges:
            if not self._replica.keys() >= {edge.source, edge.target}:
                continue
            for microbatch in range(len(self._program.sizes)):
                samples = self._samples(edge.source, microbatch) & self._samples(edge.target, microbatch)
                message = Message(edge.direction, edge.source, edge.target, microbatch, samples)
                made = self._find(edge.source, _takers(message), microbatch)
                taken = self._find(edge.target, _takers(message), microbatch)
                if samples and made is not None and taken is not None:
                    yield _Use("buffers", made.end, taken.start, self._prices.message_bytes(message))

    def _samples(self, stage: int, microbatch: int) -> Samples:
        size = self._program.sizes[microbatch]
        return self._program.layout.samples(stage, self._replica[stage], microbatch, size)

    def _find(self, stage: int, kinds: tuple[ComputeKind, ...], microbatch: int) -> Event | None:
        for kind in kinds:
            if (event := self._computes.get((stage, kind, microbatch))) is not None:
                return event
        return None


def _takers(message: Message) -> tuple[ComputeKind, ...]:
    """Return the kinds of computes that make, and that take, the values of a message."""
    return ("F",) if message.direction == "F" else _BACKWARD
