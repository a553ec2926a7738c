"""Simulation of a verified program under given prices: the start and end of each instruction.

Assumptions:

    rank       runs one compute at a time, in the order of its list; a compute starts when its receives have arrived;
               a joined W is one compute on the samples of all its micro-batches
    channel    (sender, receiver) moves one message at a time in order, from the moment that both ends have posted it;
               moving does not slow computes down. So it is too where a device carries messages and the host launches
               receives late, as long as the host is ahead of its device
    card       of a host, where cards are told of: one exchange (messages of one edge and micro-batch) after another, in
               the order in which their first messages start; an exchange waits until its cards have done the work
               that was there before it. So a card passes no more than it can, and an exchange that has it for itself
               is not slowed down. (Really, what started earlier is slowed down too, and what comes waits less.)
    Reduce     a bucket starts when all its ranks have posted it and their earlier buckets have ended; it runs beside
               computes and messages; along with a W, its pieces do so one after another, each when all ranks have
               made it. All but the last, behind which nothing is left to compute, keep their rank for a share of
               their seconds (`Prices.sum_busy_share`), by which W is longer
    own work   takes no time, keeps its rank busy, or moves a copy: one at a time in each of the two directions, in the
               order of its list and beside everything else. It starts when it is posted, and after the end of the own
               work that it follows; computes that come after it by its effects wait for its end (`core.effects`)
    milestone  takes no time, but that some wait for the end of the step before on all ranks, and that ranks wait for
               each other at one that some stages need, and are busy with it (`core.milestones`): the head
    Send       keeps its rank busy while it posts (`Prices.post_s`)
    Step       waits for the computes and reductions of all ranks, since the results of a batch (loss, logged values)
               are exchanged before any optimizer steps; for those of its own rank where ranks run ahead

Loading, posting of receives and freeing take no time. The result is the longest path through the program: every
instruction is visited once.

Legend: s stage, m micro-batch, r rank.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from typing_extensions import assert_never

from lightning_pipe.core.effects import OwnWork, Resource, effects_of
from lightning_pipe.core.milestones import Milestone, milestone_effects, ranks_at
from lightning_pipe.core.prices import Cards, Prices
from lightning_pipe.core.program import (
    AnyCompute,
    Instruction,
    Message,
    Pass,
    Recv,
    Reduce,
    Send,
    Step,
    VerifiedProgram,
)
from lightning_pipe.core.timeline import Event, Timeline

Channel: TypeAlias = tuple[int, int]  # sender, receiver
Use: TypeAlias = tuple[int, int, Pass | None, int]  # rank, stage, direction, micro-batch: who uses it
Exchange: TypeAlias = tuple[Pass, int, int, int]  # direction, source, target, micro-batch
Work: TypeAlias = tuple[int, int, int]  # rank, stage, micro-batch


def simulate(
    program: VerifiedProgram,
    prices: Prices,
    *,
    begins: Sequence[float] | None = None,
    cards: Cards | None = None,
    arrived: Mapping[Use, float] | None = None,
    together: bool = False,
) -> Timeline:
    """Return the time of every instruction of a program.

    The events of a message are the same on both ends: from the start of its move to its end.

    Args:
        program: what runs.
        prices: what it costs.
        begins: when each rank begins, where ranks run ahead (`simulator.ahead`); else all begin and step together.
        together: whether all step together although they begin each for itself.
        cards: what messages of different edges share; None if nothing.
        arrived: when messages of earlier rounds arrive that this one takes (`simulator.ahead`).
    """
    run = _Run(program, prices, begins or (0.0,) * len(program.ranks), cards)
    run.arrived = arrived or {}
    run.computes_and_messages()
    run.reductions_and_steps(together=together or begins is None)
    return Timeline(tuple(event for line in run.events for event in sorted(line, key=attrgetter("start"))))


@dataclass
class _Channel:
    """Posted ends of the messages of one channel, and the ends of the moves made so far."""

    sends: list[tuple[float, Send]] = field(default_factory=list)
    receives: list[tuple[float, Recv]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    waiting: bool = False  # whether the receiver is blocked on the next move


class _Posted(NamedTuple):
    """A sum that a rank has posted: from when to when it makes what is summed."""

    reduce: Reduce
    since: float
    until: float


class _Run:
    """Clocks of the ranks and of the channels while the program runs."""

    def __init__(self, program: VerifiedProgram, prices: Prices, begins: Sequence[float], cards: Cards | None) -> None:
        self.events: list[list[Event]] = [[] for _ in program.ranks]
        self.arrived: Mapping[Use, float] = {}
        self._program = program
        self._prices = prices
        self._clock = [*begins]
        self._stepped = max(begins)  # when all ranks have ended the step before
        self._position = [0] * len(program.ranks)
        self._channels: dict[Channel, _Channel] = defaultdict(_Channel)
        self._arrivals: dict[Use, list[tuple[_Channel, int]]] = defaultdict(list)
        self._lanes: dict[tuple[int, Resource], float] = defaultdict(float)  # rank, direction -> free from
        self._ended: dict[tuple[Work, str], float] = {}  # with the code of own work: its end
        self._gates: dict[tuple[Work, str], float] = {}  # with the kind of a compute: the end of what it waits for
        self._posted: dict[int, dict[int, _Posted]] = defaultdict(dict)  # bucket -> rank
        self._met: dict[Milestone, dict[int, float]] = defaultdict(dict)  # rank -> when it has come there
        self._along: dict[int, Reduce] = {}  # rank -> what goes along with its next compute
        self._replica = {(s, r): i for s, ranks in enumerate(program.layout.stages) for i, r in enumerate(ranks)}
        self._cards = cards
        self._busy: dict[Hashable, float] = defaultdict(float)  # card -> when the work that it has been given is done
        self._before: dict[tuple[Hashable, Exchange], float] = {}  # the same when an exchange began
        self._runnable = [(begin, rank) for rank, begin in enumerate(begins)]
        heapq.heapify(self._runnable)

    def computes_and_messages(self) -> None:
        """Run the rank whose clock is earliest: one instruction where messages share cards, else as far as it gets."""
        while self._runnable:
            _, rank = heapq.heappop(self._runnable)
            line = self._program.ranks[rank]
            while self._position[rank] < len(line) and self._try(line[self._position[rank]], rank):
                self._position[rank] += 1
                if self._cards is not None:
                    heapq.heappush(self._runnable, (self._clock[rank], rank))
                    break
        assert self._position == [len(line) for line in self._program.ranks], "a verified program does not deadlock"

    def _try(self, instruction: Instruction, rank: int) -> bool:
        """Run one instruction; return whether it could run."""
        now = self._clock[rank]
        match instruction:
            case AnyCompute():
                return self._compute(instruction, rank)
            case Send(message, peer):
                channel = self._channels[rank, peer]
                channel.sends.append((now, instruction))
                self._move(channel, (rank, peer))
                self._clock[rank] += self._prices.post_s(message)
            case Recv(message, peer):
                channel = self._channels[peer, rank]
                use = (rank, message.target, message.direction, message.microbatch)
                self._arrivals[use].append((channel, len(channel.receives)))
                channel.receives.append((now, instruction))
                self._move(channel, (peer, rank))
            case Reduce(bucket):
                self._posted[bucket][rank] = _Posted(instruction, now, now)
                if instruction.along:
                    self._along[rank] = instruction
            case Step():
                pass  # timed after the reductions
            case OwnWork():
                self._own_work(instruction, rank)
            case Milestone():
                return self._milestone(instruction, rank)
            case _:
                assert_never(instruction)
        return True

    def _compute(self, compute: AnyCompute, rank: int) -> bool:
        start = self._clock[rank]
        direction = compute.direction
        works = [(rank, compute.stage, microbatch) for microbatch in compute.microbatches]
        for _, stage, microbatch in works if direction is not None else ():
            start = max(start, self.arrived.get((rank, stage, direction, microbatch), start))
            for channel, number in self._arrivals.get((rank, stage, direction, microbatch), ()):
                if len(channel.ends) <= number:
                    channel.waiting = True
                    return False
                start = max(start, channel.ends[number])
        if self._gates:
            kinds = ("I", "W") if compute.kind == "B" else (compute.kind,)
            start = max(start, *(self._gates.get((work, kind), start) for work in works for kind in kinds))
        samples = sum(self._samples(stage, rank, microbatch) for _, stage, microbatch in works)
        reduce = self._along.pop(rank, None)
        end = start + self._prices.compute_s(compute, rank, samples) + (0.0 if reduce is None else self._busy_s(reduce))
        self._clock[rank] = end
        self.events[rank].append(Event(rank, compute, start, end))
        if reduce is not None:
            self._posted[reduce.bucket][rank] = _Posted(reduce, start, end)
        return True

    def _busy_s(self, reduce: Reduce) -> float:
        """Return by how much a sum makes the W longer with which it goes along."""
        *before, _ = self._prices.piece_shares(self._program.traffic.buckets[reduce.bucket])
        seconds = self._prices.reduce_s(reduce.bucket, self._program) * self._prices.sum_busy_share()
        return seconds * sum(share for _, share in before)

    def _pieces(self, bucket: int, *, along: bool) -> Iterator[tuple[float, float]]:
        """Yield of every piece of a bucket when it is made, as a share of W, and the seconds of its sum beside it."""
        *before, last = self._prices.piece_shares(self._program.traffic.buckets[bucket])
        seconds = self._prices.reduce_s(bucket, self._program)
        beside = 1.0 - self._prices.sum_busy_share() if along else 1.0
        for made, share in before:
            yield made, share * seconds * beside
        yield last[0], last[1] * seconds

    def _own_work(self, instruction: OwnWork, rank: int) -> None:
        """Time what a rank does for itself, on what it occupies."""
        effects = effects_of(instruction)
        start = end = self._clock[rank]
        if effects.resource is None:
            self.events[rank].append(Event(rank, instruction, start, end))
            return
        work = (rank, instruction.stage, instruction.microbatch)
        start = max(start, *(self._ended.get((work, code), start) for code in effects.after or ("",)))
        samples = self._samples(instruction.stage, rank, instruction.microbatch)
        seconds = self._prices.own_work_s(instruction, rank, samples)
        if effects.resource == "compute":
            end = start + seconds
            self._clock[rank] = end
        else:
            start = max(start, self._lanes[rank, effects.resource])
            end = start + seconds
            self._lanes[rank, effects.resource] = end
        self.events[rank].append(Event(rank, instruction, start, end))
        self._ended[work, instruction.code] = end
        for kind in effects.before:
            self._gates[work, kind] = max(end, self._gates.get((work, kind), end))

    def _milestone(self, milestone: Milestone, rank: int) -> bool:
        start = self._clock[rank]
        effects = milestone_effects(milestone)
        if effects.awaits_steps:
            self._clock[rank] = max(start, self._stepped)
        if effects.stages is not None:
            met, ranks = self._met[milestone], ranks_at(milestone, self._program)
            others = met.keys() - {rank} if rank not in met else ()
            met[rank] = start
            if len(met) < len(ranks):
                return False
            for other in others:
                heapq.heappush(self._runnable, (self._clock[other], other))
            start = max(met.values())
            self._clock[rank] = start + self._prices.head_s(rank, sum(self._program.sizes))
        self.events[rank].append(Event(rank, milestone, start, self._clock[rank]))
        return True

    def _samples(self, stage: int, rank: int, microbatch: int) -> int:
        size = self._program.sizes[microbatch]
        return len(self._program.layout.samples(stage, self._replica[stage, rank], microbatch, size))

    def _move(self, channel: _Channel, ranks: Channel) -> None:
        """Move the next message of a channel if both ends are posted."""
        number = len(channel.ends)
        if number >= min(len(channel.sends), len(channel.receives)):
            return
        (sent, send), (received, receive) = channel.sends[number], channel.receives[number]
        free = channel.ends[-1] if channel.ends else 0.0
        start = max(sent, received, free)
        end = start + self._wait_s(send.message, ranks, start) + self._transfer_s(send.message, ranks)
        channel.ends.append(end)
        self.events[ranks[0]].append(Event(ranks[0], send, start, end))
        self.events[ranks[1]].append(Event(ranks[1], receive, start, end))
        if channel.waiting:
            channel.waiting = False
            heapq.heappush(self._runnable, (self._clock[ranks[1]], ranks[1]))

    def _wait_s(self, message: Message, ranks: Channel, start: float) -> float:
        """Return the seconds until the cards on the way have done what other exchanges have given them to do."""
        if self._cards is None:
            return 0.0
        free = start
        exchange = (message.direction, message.source, message.target, message.microbatch)
        for card, work_s in self._cards.passes(message, *ranks):
            if (card, exchange) not in self._before:
                self._before[card, exchange] = self._busy[card]
                self._busy[card] = max(self._busy[card], start) + work_s
            free = max(free, self._before[card, exchange])
        return free - start

    def _transfer_s(self, message: Message, ranks: Channel) -> float:
        return self._prices.transfer_s(message, *ranks)

    def reductions_and_steps(self, *, together: bool) -> None:
        free = [0.0] * len(self._clock)
        for bucket, posted in sorted(self._posted.items()):
            pieces = self._pieces(bucket, along=any(one.reduce.along for one in posted.values()))
            start, end = _sum_times([*posted.values()], free=max(free[rank] for rank in posted), pieces=[*pieces])
            for rank, (reduce, _, _) in posted.items():
                free[rank] = end
                self.events[rank].append(Event(rank, reduce, start, end))
        if not (self._program.training and self._program.synchronise):
            return
        last = max(*self._clock, *free)
        for rank, done in enumerate(self._clock):
            start = last if together else max(done, free[rank])
            self.events[rank].append(Event(rank, Step(), start, start + self._prices.step_s(rank)))


def _sum_times(posted: Sequence[_Posted], *, free: float, pieces: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return when the sum of a bucket begins and ends.

    Args:
        posted: by every rank.
        free: when earlier sums of these ranks have ended.
        pieces: of each, the share of that time after which it is made, and the seconds of its sum.
    """
    start, end = math.inf, free
    for made, seconds in pieces:
        begin = max(end, *(since + made * (until - since) for _, since, until in posted))
        start, end = min(start, begin), begin + seconds
    return start, end
