"""Start times of an order's computes on a chain of stages with given times, without building the program.

The answer of `simulator.simulate` for the lowered order, without building the program; for schedules that try many
orders. The assumptions are those of lowering and of the simulator:

    rank      runs one compute at a time in its order; a compute starts when its messages have arrived
    message   from every compute to the same pass of the next stage, on every pair of replicas that share samples, each
              for `Times.message_s`; the input gradient leaves after I, also that of a B
    channel   (sender, receiver) moves one message at a time in the order of the sends, from the moment that both ends
              have posted it: the sender when it is made, the receiver `AHEAD` computes before its use, or earlier
              where a later message of the channel is used earlier
    copy      to the host from the end of F on, and back from the place of `FETCH` on: one at a time in each direction
              on a rank, beside all else; `VACATE` waits for the end of the way out, I for that of the way back

Optimizer steps, reductions, memory and what posting costs are left out.

Legend: s stage, m micro-batch, r rank.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias

from lightning_pipe.core.program import (
    Compute,
    ComputeKind,
    CopyingOrder,
    Edge,
    HostCopy,
    Layout,
    Order,
    Traffic,
)
from lightning_pipe.errors import ProgramError
from lightning_pipe.schedule.construct.stage_times import ChainTimes
from lightning_pipe.schedule.lower.transfers import AHEAD
from lightning_pipe.schedule.rules import Dataflow, halves

Parcel: TypeAlias = tuple[int, int, int]  # source stage, target stage, micro-batch
Work: TypeAlias = tuple[int, int]  # stage, micro-batch
Channels: TypeAlias = dict[tuple[int, int], "_Channel"]  # by sender and receiver


def chain_makespan(order: CopyingOrder, layout: Layout, times: ChainTimes) -> float:
    """Return the seconds from the first start to the last end of an order's computes.

    Raises:
        ProgramError: if a compute waits for one that does not come.
    """
    return max((line.ends[-1] for line in _run(order, layout, times) if line.ends), default=0.0)


def chain_starts(order: Order, layout: Layout, times: ChainTimes) -> list[list[float]]:
    """Return the start of every compute of every rank, in the places of the order.

    A B starts with its I. A compute of which its rank has no samples starts when its turn comes, and takes no time.

    Raises:
        ProgramError: if a compute waits for one that does not come.
    """
    return [
        [line.starts[first] if first < len(line.starts) else line.ends[-1] for first in line.firsts]
        for line in _run(order, layout, times)
    ]


@dataclass
class _Channel:
    """Messages from one rank to another, in the order of the sends.

    Attributes:
        receiver: rank that gets them.
        wanted: by message, the number of computes that the receiver starts before it posts at the latest.
        numbers: by message, its place in the order.
        seconds: of every message.
        posts: how many computes the receiver starts before it posts each message.
        sent: when each message was made.
        ends: when each message that can move has arrived.
        waiting: whether the receiver waits for the next.
    """

    receiver: int = 0
    wanted: dict[Parcel, int] = field(default_factory=dict)
    numbers: dict[Parcel, int] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    posts: list[int] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    waiting: bool = False

    def arrival(self, number: int, receiver: _Line) -> float | None:
        """Return when a message arrives, or None as long as it is not sent."""
        while len(self.ends) <= number:
            k = len(self.ends)
            if k == len(self.sent):
                return None
            posted = receiver.ends[self.posts[k] - 1] if self.posts[k] else 0.0
            free = self.ends[-1] if self.ends else 0.0
            self.ends.append(max(self.sent[k], posted, free) + self.seconds[k])
        return self.ends[number]


@dataclass
class _Copies:
    """The copies of one rank to its host and back.

    Attributes:
        before: by task, the places of copies before it.
        leaving: stages and micro-batches that are copied.
        clocks: by task so far, when the rank comes to it.
        away: when each has left.
        back: when each is back.
        out_free: when the lane to the host is free.
        back_free: when the lane back is free.
    """

    before: dict[int, list[HostCopy]] = field(default_factory=lambda: defaultdict(list))
    leaving: set[Work] = field(default_factory=set)
    clocks: list[float] = field(default_factory=list)
    away: dict[Work, float] = field(default_factory=dict)
    back: dict[Work, float] = field(default_factory=dict)
    out_free: float = 0.0
    back_free: float = 0.0

    def put(self, copy: HostCopy, number: int) -> None:
        """Place a copy before a task."""
        self.before[number].append(copy)
        self.leaving.add((copy.stage, copy.microbatch))

    def clock(self, number: int, now: float, times: ChainTimes) -> float:
        """Return when the rank, at `now` with the task before, comes to a task."""
        if len(self.clocks) <= number:
            for copy in self.before.get(number, ()):
                work = (copy.stage, copy.microbatch)
                if copy.effects.bytes < 0:
                    now = max(now, self.away[work])
                else:
                    start = max(now, self.away[work], self.back_free)
                    self.back[work] = self.back_free = start + times.copy_s[copy.stage]
            self.clocks.append(now)
        return self.clocks[number]

    def leave(self, task: Compute, end: float, times: ChainTimes) -> None:
        """Begin the way out behind an F."""
        work = (task.stage, task.microbatch)
        if task.kind == "F" and work in self.leaving:
            self.away[work] = self.out_free = max(end, self.out_free) + times.copy_s[task.stage]


@dataclass
class _Line:
    """What one rank runs.

    Attributes:
        tasks: its computes with samples, each B as I and W.
        firsts: by place in the order, the number of the first task that starts there.
        gets: by task, the messages that it waits for: channel and number.
        gives: by task, the channels of the messages that it makes.
        starts: of the tasks so far.
        ends: of the tasks so far.
        copies: to the host and back.
    """

    tasks: list[Compute] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    gets: list[list[tuple[_Channel, int]]] = field(default_factory=list)
    gives: list[list[_Channel]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    copies: _Copies = field(default_factory=_Copies)


def _run(order: CopyingOrder, layout: Layout, times: ChainTimes) -> list[_Line]:
    """Run an order; return its lines with their starts and ends."""
    lines = _lines(order, layout, times)
    runnable = deque(range(len(lines)))
    while runnable:
        line = lines[runnable.popleft()]
        while _is_unfinished(line) and (ready := _inputs_s(line, times)) is not None:
            runnable.extend(_compute(line, ready, times))
    stuck = [f"{line.tasks[len(line.ends)]} on rank {r}" for r, line in enumerate(lines) if _is_unfinished(line)]
    if stuck:
        raise ProgramError(f"the order waits for itself: next are {', '.join(stuck)}")
    return lines


def _inputs_s(line: _Line, times: ChainTimes) -> float | None:
    """Return when the inputs of the next compute are there and its rank is free; None, and wait, if that is unknown."""
    n = len(line.ends)
    ready = line.copies.clock(n, line.ends[-1] if line.ends else 0.0, times)
    if line.tasks[n].kind == "I":
        ready = max(ready, line.copies.back.get((line.tasks[n].stage, line.tasks[n].microbatch), ready))
    for channel, number in line.gets[n]:
        arrival = channel.arrival(number, line)
        if arrival is None:
            channel.waiting = True
            return None
        ready = max(ready, arrival)
    return ready


def _compute(line: _Line, start: float, times: ChainTimes) -> Iterator[int]:
    """Run the next compute of a line; yield the ranks that have waited for what it sends."""
    n = len(line.ends)
    line.starts.append(start)
    line.ends.append(start + times.compute_s(line.tasks[n]))
    line.copies.leave(line.tasks[n], line.ends[n], times)
    for channel in line.gives[n]:
        channel.sent.append(line.ends[n])
        if channel.waiting:
            channel.waiting = False
            yield channel.receiver


def _is_unfinished(line: _Line) -> bool:
    return len(line.ends) < len(line.tasks)


def _lines(order: CopyingOrder, layout: Layout, times: ChainTimes) -> list[_Line]:
    """Return what the ranks run, with the channels between them."""
    wiring = _wiring(layout)
    channels: Channels = defaultdict(_Channel)
    lines = [_line(computes, rank, wiring) for rank, computes in enumerate(order)]
    for rank, line in enumerate(lines):
        for n, task in enumerate(line.tasks):
            for source, sender in wiring.of(task, rank).senders:
                channels[sender, rank].wanted[source, task.stage, task.microbatch] = max(0, n - AHEAD)
    for rank, line in enumerate(lines):
        line.gives = [list(_given(task, rank, wiring, channels, times)) for task in line.tasks]
    for (_, receiver), channel in channels.items():
        channel.receiver = receiver
        channel.posts = list(accumulate(reversed(channel.posts), min))[::-1]  # no later than its successors
    for rank, line in enumerate(lines):
        line.gets = [list(_gotten(task, rank, wiring, channels)) for task in line.tasks]
    return lines


def _line(computes: Iterable[Compute | HostCopy], rank: int, wiring: _Wiring) -> _Line:
    line, done = _Line(), set[Compute]()
    for compute in computes:
        if isinstance(compute, HostCopy):
            if not wiring.is_empty(Compute(compute.stage, "F", compute.microbatch), rank):
                line.copies.put(compute, len(line.tasks))
            continue
        line.firsts.append(len(line.tasks))
        for task in halves(compute):
            if wiring.is_empty(task, rank):
                continue
            for needed in wiring.of(task, rank).computes:
                if replace(needed, microbatch=task.microbatch) not in done:
                    raise ProgramError(f"rank {rank}: {task} waits for {needed} of its micro-batch, which comes later")
            done.add(task)
            line.tasks.append(task)
    return line


def _given(task: Compute, rank: int, wiring: _Wiring, channels: Channels, times: ChainTimes) -> Iterator[_Channel]:
    """Enter the messages that a task makes, and yield the channel of each."""
    for target, receiver in wiring.of(task, rank).receivers:
        channel, parcel = channels[rank, receiver], (task.stage, target, task.microbatch)
        if parcel in channel.wanted:
            channel.numbers[parcel] = len(channel.posts)
            channel.posts.append(channel.wanted[parcel])
            channel.seconds.append(times.message_s(task.stage, target))
            yield channel


def _gotten(task: Compute, rank: int, wiring: _Wiring, channels: Channels) -> Iterator[tuple[_Channel, int]]:
    """Yield channel and number of the messages that a task waits for."""
    for source, sender in wiring.of(task, rank).senders:
        channel, parcel = channels[sender, rank], (source, task.stage, task.microbatch)
        if parcel not in channel.numbers:
            raise ProgramError(f"rank {rank}: {task} waits for a message from stage {source}, which is never sent")
        yield channel, channel.numbers[parcel]


@dataclass(frozen=True)
class _Wire:
    """What a compute waits for and gives: stages and ranks at the other ends of messages, computes of its own rank."""

    senders: tuple[tuple[int, int], ...] = ()
    receivers: tuple[tuple[int, int], ...] = ()
    computes: tuple[Compute, ...] = ()


class _Wiring:
    """Who waits for whom in a chain; the same again after as many micro-batches as whole ones go round the replicas."""

    def __init__(self, layout: Layout) -> None:
        stages = len(layout.stages)
        ahead = [Edge("F", s, s + 1, 1.0) for s in range(stages - 1)]
        back = [Edge("B", s + 1, s, 1.0) for s in range(stages - 1)]
        self._turns = math.lcm(*(len(layout.stages[s]) for s in layout.whole))
        sizes = (math.lcm(*(sum(layout.shares(s)) for s in range(stages))),) * self._turns  # all replicas have samples
        flow = Dataflow(layout, sizes=sizes, traffic=Traffic((*ahead, *back), (), loads=()))
        self._wires = {
            (rank, s, kind, turn): _wire(flow, Compute(s, kind, turn), rank)
            for s, ranks in enumerate(layout.stages)
            for rank in ranks
            for turn in range(self._turns)
            for kind in KINDS
            if flow.samples(s, rank=rank, microbatch=turn)
        }

    def is_empty(self, task: Compute, rank: int) -> bool:
        """Return whether a rank has no samples for a task."""
        return (rank, task.stage, task.kind, task.microbatch % self._turns) not in self._wires

    def of(self, task: Compute, rank: int) -> _Wire:
        """Return what a task waits for and gives."""
        return self._wires[rank, task.stage, task.kind, task.microbatch % self._turns]


KINDS: tuple[ComputeKind, ...] = ("F", "I", "W")


def _wire(flow: Dataflow, compute: Compute, rank: int) -> _Wire:
    needs = flow.needs(compute, rank=rank)
    return _Wire(
        tuple((receive.message.source, receive.peer) for receive in needs.receives),
        tuple((send.message.target, send.peer) for send in flow.gives(compute, rank=rank)),
        needs.computes,
    )


@lru_cache(maxsize=8)
def _wiring(layout: Layout) -> _Wiring:
    return _Wiring(layout)
