"""Laws of programs on a device that carries messages itself: a launch may wait for every receive launched before it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from lightning_pipe.core.program import AnyCompute, Compute, Instruction, Layout, Program, Recv, Send
from lightning_pipe.errors import PipeError, ProgramError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import SCHEDULES
from lightning_pipe.schedule.verification.deadlock import ends_within
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.strategy.plans.runtime_overhead import chain_traffic
from lightning_pipe.strategy.steps.message_bounds import message_bounds
from schedule.test_verify import random_program

SEARCHED = {"milp"}  # its search takes minutes for these sizes


@cache
def programs_of(schedule: str) -> tuple[Program, ...]:
    """Return programs of a schedule on 2 to 8 ranks, with every number of stages per device and several sizes."""
    return tuple(_programs_of(schedule))


def _programs_of(schedule: str) -> Iterator[Program]:
    known = SCHEDULES[schedule]
    for ranks in (2, 3, 4, 8):
        for per_device in known.stages_per_device:
            for microbatches in (ranks, 2 * ranks, 4 * ranks) if ranks < 8 else (16,):
                try:
                    layout = known.layout([(rank,) for rank in range(ranks)], per_device)
                    order = order_of(schedule, layout=layout, microbatches=microbatches)
                except PipeError:
                    continue  # made for other sizes
                traffic = chain_traffic(len(layout.stages), 4)
                yield lower(order, layout=layout, sizes=(1,) * microbatches, traffic=traffic)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in SEARCHED])
def test_every_schedule_ends_though_launches_wait_for_launched_receives(schedule: str) -> None:
    assert programs_of(schedule)
    for program in programs_of(schedule):
        assert verify(program, launches="late").launches == "late"


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in SEARCHED])
def test_no_schedule_ends_where_receives_are_launched_as_far_ahead_as_they_are_announced(schedule: str) -> None:
    for program in programs_of(schedule):
        with pytest.raises(ProgramError, match='law "launch": rank'):
            verify(program, launches="early")


def test_random_layouts_with_replicas_end_though_launches_wait_for_launched_receives() -> None:
    rng = random.Random(7)
    for _ in range(300):
        verify(random_program(rng), launches="late")


def moved(program: Program, receive: Recv, *, rank: int, position: int) -> Program:
    """Return a program with one receive at another position of its rank."""
    line = [x for x in program.ranks[rank] if x != receive]
    line.insert(position, receive)
    ranks = tuple(tuple(line) if number == rank else other for number, other in enumerate(program.ranks))
    return replace(program, ranks=ranks)


def late_program() -> Program:
    """Return 1F1B on two ranks with every receive right before the compute that needs it."""
    layout = Layout(((0,), (1,)))
    program = lower(
        order_of("1f1b", layout=layout, microbatches=3), layout=layout, sizes=(1,) * 3, traffic=chain_traffic(2, 4)
    )
    for rank, line in enumerate(program.ranks):
        for receive in (x for x in line if isinstance(x, Recv)):
            message = receive.message
            user = Compute(message.target, "F" if message.direction == "F" else "I", message.microbatch)
            rest = [x for x in program.ranks[rank] if x != receive]
            program = moved(program, receive, rank=rank, position=rest.index(user))
    return program


def test_one_receive_too_early_is_refused_with_rank_position_and_instruction() -> None:
    program = late_program()
    verify(program, launches="early")
    line = program.ranks[0]
    receive = next(x for x in line if isinstance(x, Recv))
    broken = moved(program, receive, rank=0, position=0)
    verify(broken)  # a host that carries messages does not mind
    with pytest.raises(ProgramError) as caught:
        verify(broken, launches="early")
    blocked = next(i for i, x in enumerate(broken.ranks[0]) if i and not isinstance(x, Recv))
    assert f'law "launch": rank 0, position {blocked}, {broken.ranks[0][blocked]} waits for rank 1' in str(caught.value)
    assert f"to send {receive.message}, whose receive is launched at position 0" in str(caught.value)


def use_of(receive: Recv) -> tuple[int, str, int]:
    """Return stage, direction and micro-batch of the compute that takes a message."""
    return receive.message.target, receive.message.direction, receive.message.microbatch


class BoundedRun:
    """A second statement of a run within bounds: all ranks in turns, messages move when their receiver needs them."""

    def __init__(self, program: Program, bounds: tuple[int, ...]) -> None:
        self.program, self.bounds = program, bounds
        ranks = range(len(program.ranks))
        self.left = {rank: list(program.ranks[rank]) for rank in ranks}
        self.sent: dict[int, list[Send]] = {rank: [] for rank in ranks}
        self.posted: dict[int, list[Recv]] = {rank: [] for rank in ranks}
        self.launched: set[tuple[int, Recv]] = set()
        self.made: set[tuple[int, Send]] = set()

    def ends(self) -> bool:
        """Run as far as it goes."""
        while sum(self.run(rank) for rank in self.left):
            pass
        return not any(self.left.values())

    def run(self, rank: int) -> bool:
        """Run a rank; return whether anything has changed."""
        before = len(self.left[rank]), len(self.launched)
        while self.left[rank] and self.passes(self.left[rank][0], rank):
            self.left[rank].pop(0)
        return before != (len(self.left[rank]), len(self.launched))

    def passes(self, x: Instruction, rank: int) -> bool:
        match x:
            case Send():
                self.sent[rank].append(x)
                self.made.add((rank, x))
            case Recv():
                self.posted[rank].append(x)
            case AnyCompute() if x.direction is not None:
                uses = {(x.stage, x.direction, microbatch) for microbatch in x.microbatches}
                needed = [receive for receive in self.posted[rank] if use_of(receive) in uses]
                for receive in needed:  # and what its channel has to carry before it
                    earlier = self.posted[rank][: self.posted[rank].index(receive) + 1]
                    self.launched |= {(rank, other) for other in earlier if other.peer == receive.peer}
                if any((receive.peer, Send(receive.message, rank)) not in self.made for receive in needed):
                    return False
                waiting = len(self.posted[rank]) - len(needed)
                if not self.has_room(rank, waiting):
                    return False
                self.posted[rank] = [receive for receive in self.posted[rank] if receive not in needed]
            case AnyCompute():
                return self.has_room(rank, len(self.posted[rank]))
        return True

    def has_room(self, rank: int, receives: int) -> bool:
        sends = self.sent[rank]
        while sends and len(sends) + receives > self.bounds[rank]:
            if (sends[0].peer, Recv(sends[0].message, rank)) not in self.launched:
                return False
            sends.pop(0)
        return True


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name not in SEARCHED])
def test_programs_end_within_their_bounds_on_messages_though_the_host_is_never_ahead(schedule: str) -> None:
    for program in programs_of(schedule)[:7]:
        proved = verify(program, launches="late")
        bounds = message_bounds(proved)
        for change in (0, -1):
            changed = tuple(max(0, bound + change) for bound in bounds)
            assert ends_within(proved, changed) == BoundedRun(proved, changed).ends()
        assert ends_within(proved, bounds)


def test_bounds_that_are_too_low_are_told() -> None:
    program = verify(programs_of("interleaved")[1], launches="late")
    assert not ends_within(program, (0,) * len(program.ranks))


def test_a_receive_that_its_channel_forces_to_be_launched_early_waits_for_nothing_later() -> None:
    layout = Layout(((0,), (1,), (0,)))  # rank 1 sends F to stage 2 and B to stage 0 along one channel
    program = lower(
        order_of("gpipe", layout=layout, microbatches=4), layout=layout, sizes=(1,) * 4, traffic=chain_traffic(3, 4)
    )
    verify(program, launches="late")
