"""Deadlock check: every rank reaches its end whatever the transport buffers, or the error names who waits for whom.

The program is run without time under the weakest promises that a transport may keep:

    Send, Recv   are posted and do not block
    channel      (sender, receiver) has no buffer: its k-th message moves when the k-th send and receive are posted
    Compute      blocks until the receives posted for it have moved
    Reduce       is posted and does not block
    own work     waits for nobody but its own rank, in the order of its list
    milestone    waits for nobody in this program, or for the end of the one before
    Step         blocks until every reduction that its rank posted is posted by all ranks that hold the bucket

A program that ends here ends on every transport that keeps the order of a channel. The laws local to a rank and the
order of channels must have been checked before.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import TypeAlias

from typing_extensions import assert_never

from lightning_pipe.core.effects import OwnWork, effects_of
from lightning_pipe.core.milestones import Milestone, milestone_effects
from lightning_pipe.core.program import AnyCompute, Instruction, Pass, Program, Recv, Reduce, Send, Step
from lightning_pipe.errors import ProgramError
from lightning_pipe.schedule.rules import holders

Channel: TypeAlias = tuple[int, int]
Use: TypeAlias = tuple[int, int, Pass, int]  # rank, stage, direction, micro-batch: the compute that uses a message


def check_progress(program: Program) -> None:
    """Run a program without time.

    Raises:
        ProgramError: naming the circle of ranks that wait for each other.
    """
    run = _Run(program)
    stuck = run.to_the_end()
    if stuck:
        raise ProgramError(f'law "deadlock": {_circle(program, stuck)}')


class _Run:
    """Positions of the ranks, messages sent so far, and who waits for what."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._position = [0] * len(program.ranks)
        self._sent: Counter[Channel] = Counter()
        self._received: Counter[Channel] = Counter()
        self._arrivals: dict[Use, list[tuple[Channel, int]]] = defaultdict(list)
        self._reduced: dict[int, set[int]] = defaultdict(set)
        buckets = program.traffic.buckets
        self._holders = [holders(bucket, layout=program.layout) for bucket in buckets]
        self._blocked: dict[int, list[int]] = defaultdict(list)  # rank that must move -> ranks that wait for it

    def to_the_end(self) -> dict[int, tuple[int, int]]:
        """Return by stuck rank its position and the rank that it waits for."""
        waits: dict[int, tuple[int, int]] = {}
        runnable = deque(range(len(self._position)))
        while runnable:
            rank = runnable.popleft()
            waits.pop(rank, None)
            before = self._position[rank]
            awaited = self._advance(rank)
            if self._position[rank] > before:
                runnable.extend(self._blocked.pop(rank, ()))
            if awaited is not None:
                waits[rank] = (self._position[rank], awaited)
                self._blocked[awaited].append(rank)
        return waits

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
                milestone_effects(instruction)
            case _:
                assert_never(instruction)
        return None

    def _late_sender(self, use: Use) -> int | None:
        late = (channel[0] for channel, number in self._arrivals[use] if self._sent[channel] <= number)
        return next(late, None)

    def _late_holder(self, rank: int) -> int | None:
        needed = ((bucket, other) for bucket in self._reduced[rank] for other in sorted(self._holders[bucket]))
        return next((other for bucket, other in needed if bucket not in self._reduced[other]), None)


def _circle(program: Program, stuck: dict[int, tuple[int, int]]) -> str:
    """Describe the circle reached from the lowest stuck rank."""
    rank, seen = min(stuck), list[int]()
    while rank not in seen:
        seen.append(rank)
        rank = stuck[rank][1]
    circle = seen[seen.index(rank) :]
    links = [
        f"rank {r}, position {stuck[r][0]}, {program.ranks[r][stuck[r][0]]} waits for rank {stuck[r][1]}"
        for r in circle
    ]
    return "; ".join(links)
