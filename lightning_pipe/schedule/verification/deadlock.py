"""Deadlock check: every rank reaches its end whatever the transport buffers, or the error names who waits for whom.

The program is run without time under the weakest promises that a transport may keep:

    Send, Recv   are posted and do not block
    channel      (sender, receiver) has no buffer: its k-th message moves when the k-th send and receive are posted
    Compute      blocks until the receives posted for it have moved
    Reduce       is posted and does not block
    own work     waits for nobody but its own rank, in the order of its list
    milestone    waits for nobody in this program, or for the end of the one before; where some stages need it, until
                 all of their ranks have come to it
    Step         blocks until every reduction that its rank posted is posted by all ranks that hold the bucket

A program that ends here ends on every transport that keeps the order of a channel and whose host carries the messages.

A device that carries messages itself (NCCL) promises less: a launched receive runs on the device until its message has
come. Whatever makes the host wait for the device (the first launch of a kernel, cudaFree, pinned memory, Triton's
tuning) then waits for that message. So there the law "launch" replaces what a compute waits for:

    launch       Compute, Send, Reduce, own work, milestone, Step: may each block until every receive that its rank
                 has launched has moved
    Recv         "early": is launched where it stands, and is a launch itself
                 "late": is launched by the compute that needs it, behind earlier receives of its channel

Late receives keep this law whenever the program keeps the one above: a channel keeps its order, so a receive that is
launched for a later one of its channel waits for a message that has been sent before. Sends are not waited for here:
no order of receives tried frees all schedules then. That part is the transport's, which carries the first run of each
program over the host (`runtime.transport.staged`).

The laws local to a rank and the order of channels must have been checked before.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from typing_extensions import assert_never

from lightning_pipe.core.effects import OwnWork, effects_of
from lightning_pipe.core.milestones import Milestone, milestone_effects, ranks_at
from lightning_pipe.core.program import (
    AnyCompute,
    Instruction,
    Launches,
    Pass,
    Program,
    Recv,
    Reduce,
    Send,
    Step,
    VerifiedProgram,
)
from lightning_pipe.errors import ProgramError
from lightning_pipe.schedule.rules import holders

Channel: TypeAlias = tuple[int, int]
Use: TypeAlias = tuple[int, int, Pass, int]  # rank, stage, direction, micro-batch: the compute that uses a message


def ends_within(program: VerifiedProgram, most_messages: Sequence[int]) -> bool:
    """Return whether a program ends on a device though each compute first waits until few messages are under way.

    A message is under way from its place in the list until the receiver has launched it (sends), or until the compute
    that takes it (receives). The oldest sends are waited for. A host that waits for its stream launches nothing ahead,
    so a receive is launched no sooner than by the compute that needs it.

    Args:
        program: proved for launches "late".
        most_messages: by rank, how many may be under way beside a compute.
    """
    return not _DeviceRun(program, is_early=False, most_messages=most_messages).to_the_end()


def check_progress(program: Program, *, launches: Launches = "on host") -> None:
    """Run a program without time.

    Args:
        program: of which all other laws hold.
        launches: how the transport launches receives.

    Raises:
        ProgramError: naming the circle of ranks that wait for each other, and the receive that is launched too early.
    """
    run = _Run(program) if launches == "on host" else _DeviceRun(program, is_early=launches == "early")
    stuck = run.to_the_end()
    if stuck:
        raise ProgramError(f'law "{run.law}": {_circle(program, stuck, run.remark)}')


class _Run:
    """Positions of the ranks, messages sent so far, and who waits for what."""

    law = "deadlock"

    def __init__(self, program: Program) -> None:
        self._program = program
        self._position = [0] * len(program.ranks)
        self._sent: Counter[Channel] = Counter()
        self._received: Counter[Channel] = Counter()
        self._arrivals: dict[Use, list[tuple[Channel, int]]] = defaultdict(list)
        self._reduced: dict[int, set[int]] = defaultdict(set)
        self._met: dict[Milestone, set[int]] = defaultdict(set)  # ranks that have come to it
        buckets = program.traffic.buckets
        self._holders = [holders(bucket, layout=program.layout) for bucket in buckets]
        self._blocked: dict[int, list[int]] = defaultdict(list)  # rank that must move -> ranks that wait for it
        self._stirred = set[int]()  # ranks that have done something for others where they stand

    def to_the_end(self) -> dict[int, tuple[int, int]]:
        """Return by stuck rank its position and the rank that it waits for."""
        waits: dict[int, tuple[int, int]] = {}
        runnable = deque(range(len(self._position)))
        while runnable:
            rank = runnable.popleft()
            waits.pop(rank, None)
            before = self._position[rank]
            awaited = self._advance(rank)
            if self._position[rank] > before or rank in self._stirred:
                self._stirred.discard(rank)
                runnable.extend(self._blocked.pop(rank, ()))
            if awaited is not None:
                waits[rank] = (self._position[rank], awaited)
                self._blocked[awaited].append(rank)
        return waits

    def remark(self, rank: int) -> str:
        """Return what else is to be said of what a stuck rank waits for."""
        return ""

    def _advance(self, rank: int) -> int | None:
        """Run a rank until it ends or blocks; return the rank that it waits for."""
        line = self._program.ranks[rank]
        while self._position[rank] < len(line):
            awaited = self._try(line[self._position[rank]], rank)
            if awaited is not None:
                return awaited
            self._position[rank] += 1
        return None

    def _try(self, instruction: Instruction, rank: int) -> int | None:
        match instruction:
            case Send(_, peer):
                self._sent[rank, peer] += 1
            case Recv(message, peer):
                use = (rank, message.target, message.direction, message.microbatch)
                self._arrivals[use].append(((peer, rank), self._received[peer, rank]))
                self._received[peer, rank] += 1
            case AnyCompute():
                if (direction := instruction.direction) is not None:
                    uses = ((rank, instruction.stage, direction, microbatch) for microbatch in instruction.microbatches)
                    return next((late for use in uses if (late := self._late_sender(use)) is not None), None)
            case Reduce(bucket):
                self._reduced[rank].add(bucket)
            case Step():
                return self._late_holder(rank)
            case OwnWork():
                effects_of(instruction)  # waits for nobody, but must be known
            case Milestone():
                return self._late_member(instruction, rank)
            case _:
                assert_never(instruction)
        return None

    def _late_sender(self, use: Use) -> int | None:
        late = (channel[0] for channel, number in self._arrivals[use] if self._sent[channel] <= number)
        return next(late, None)

    def _late_member(self, milestone: Milestone, rank: int) -> int | None:
        if milestone_effects(milestone).stages is None:
            return None
        if rank not in self._met[milestone]:
            self._met[milestone].add(rank)
            self._stirred.add(rank)
        return min(ranks_at(milestone, self._program) - self._met[milestone], default=None)

    def _late_holder(self, rank: int) -> int | None:
        needed = ((bucket, other) for bucket in self._reduced[rank] for other in sorted(self._holders[bucket]))
        return next((other for bucket, other in needed if bucket not in self._reduced[other]), None)


class _DeviceRun(_Run):
    """The same where every launch may wait for all receives that its rank has launched.

    Args:
        program: to be run.
        is_early: whether receives are launched where they stand.
        most_messages: by rank, how many messages may be under way beside a compute; None for any number.
    """

    law = "launch"

    def __init__(self, program: Program, *, is_early: bool, most_messages: Sequence[int] | None = None) -> None:
        super().__init__(program)
        self._is_early, self._most = is_early, most_messages
        self._sends: dict[int, deque[tuple[Channel, int]]] = defaultdict(deque)  # by rank: those under way
        self._taken: Counter[Channel] = Counter()  # launched receives
        self._receiving: Counter[int] = Counter()  # by rank: receives that no compute has taken
        self._waiting: dict[int, deque[_Launched]] = defaultdict(deque)  # by rank: launched receives
        self._announced: dict[Channel, deque[_Launched]] = defaultdict(deque)

    def remark(self, rank: int) -> str:
        if not self._waiting[rank]:
            return ""
        launched = self._waiting[rank][0]
        return f" to send {launched.receive.message}, whose receive is launched at position {launched.position}"

    def _try(self, instruction: Instruction, rank: int) -> int | None:
        if isinstance(instruction, Recv):
            if self._is_early and (late := self._late_launched(rank)) is not None:
                return late
            channel = (instruction.peer, rank)
            launched = _Launched(instruction, channel, self._received[channel], self._position[rank])
            (self._waiting[rank] if self._is_early else self._announced[channel]).append(launched)
            self._receiving[rank] += 1
        elif isinstance(instruction, AnyCompute) and not self._is_early:
            self._launch(instruction, rank)
        if not isinstance(instruction, Recv) and (late := self._late_launched(rank)) is not None:
            return late
        if isinstance(instruction, Send):
            channel = (rank, instruction.peer)
            self._sends[rank].append((channel, self._sent[channel]))
        elif isinstance(instruction, AnyCompute) and (full := self._late_taker(instruction, rank)) is not None:
            return full
        return super()._try(instruction, rank)

    def _late_taker(self, compute: AnyCompute, rank: int) -> int | None:
        """Return the rank that has not launched the receive of the oldest send, if too many messages are under way."""
        if self._most is None:
            return None
        sends, receives = self._sends[rank], self._receiving[rank] - len(self._needed(compute, rank))
        while len(sends) + receives > self._most[rank] and sends and self._taken[sends[0][0]] > sends[0][1]:
            sends.popleft()
        if sends and len(sends) + receives > self._most[rank]:
            return sends[0][0][1]
        self._receiving[rank] = receives
        return None

    def _needed(self, compute: AnyCompute, rank: int) -> list[tuple[Channel, int]]:
        """List the messages that a compute takes."""
        if (direction := compute.direction) is None:
            return []
        uses = ((rank, compute.stage, direction, microbatch) for microbatch in compute.microbatches)
        return [arrival for use in uses for arrival in self._arrivals[use]]

    def _launch(self, compute: AnyCompute, rank: int) -> None:
        """Launch the receives that a compute needs, and earlier ones of their channels."""
        for channel, number in self._needed(compute, rank):
            announced = self._announced[channel]
            while announced and announced[0].number <= number:
                self._waiting[rank].append(announced.popleft())
                self._taken[channel] += 1
                self._stirred.add(rank)

    def _late_launched(self, rank: int) -> int | None:
        """Return the rank that has not sent what the oldest launched receive of this one waits for."""
        waiting = self._waiting[rank]
        while waiting and self._sent[waiting[0].channel] > waiting[0].number:
            waiting.popleft()
        return waiting[0].channel[0] if waiting else None


class _Launched(NamedTuple):
    """A receive, the number of its message in the channel, and its position on the rank."""

    receive: Recv
    channel: Channel
    number: int
    position: int


def _circle(program: Program, stuck: dict[int, tuple[int, int]], remark: Callable[[int], str]) -> str:
    """Describe the circle reached from the lowest stuck rank."""
    rank, seen = min(stuck), list[int]()
    while rank not in seen:
        seen.append(rank)
        rank = stuck[rank][1]
    circle = seen[seen.index(rank) :]
    links = [
        f"rank {r}, position {stuck[r][0]}, {program.ranks[r][stuck[r][0]]} waits for rank {stuck[r][1]}{remark(r)}"
        for r in circle
    ]
    return "; ".join(links)
