"""Laws of leaving a program before its first backward."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from lightning_pipe.core.milestones import Confirm, Milestone, Publish, Rollback
from lightning_pipe.core.program import AnyCompute, Compute, Edge, Layout, Recv, Reduce, Send, VerifiedProgram
from lightning_pipe.errors import ProgramError
from lightning_pipe.runtime.abort_program import begun, left_over
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.orders.forward_only import forward_only
from lightning_pipe.schedule.registry import SCHEDULES, order_of
from lightning_pipe.schedule.verification.verify import verify

QUICK = [name for name in SCHEDULES if name != "milp"]


def program_of(schedule: str, layout: Layout, *, m: int = 8, training: bool = True) -> VerifiedProgram:
    stages = len(layout.stages)
    skips = [Edge("F", 0, stages - 1, 1.0), Edge("B", stages - 1, 0, 1.0)] if stages > 2 else []
    straight = chain(stages)
    traffic = replace(straight, edges=(*straight.edges, *skips))
    order = order_of(schedule, layout=layout, microbatches=m) if training else forward_only(layout, m)
    lowered = lower(
        order, layout=layout, sizes=(6,) * m, traffic=traffic, training=training, confirms=training, publishes=True
    )
    return verify(lowered)


def layouts(schedule: str) -> list[Layout]:
    return [SCHEDULES[schedule].layout([(rank,) for rank in range(p)]) for p in (2, 4)]


def channels(program: VerifiedProgram) -> tuple[dict, dict]:
    """Return what both ends of every channel post until the program is given up, in order."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, (line, rest) in enumerate(zip(program.ranks, left_over(program), strict=True)):
        for instruction in (*begun(line), *rest):
            match instruction:
                case Send(message, peer):
                    sent[rank, peer].append(message)
                case Recv(message, peer):
                    received[peer, rank].append(message)
    return sent, received


@pytest.mark.parametrize("schedule", QUICK)
def test_both_ends_of_every_channel_post_the_same_messages_in_order(schedule):
    replicated = [Layout(((0, 1), (2,), (3, 4, 5)))] if schedule in ("gpipe", "1f1b", "zb_h2") else []
    for layout in [*layouts(schedule), *replicated]:
        sent, received = channels(program_of(schedule, layout))
        assert {k: v for k, v in sent.items() if v} == {k: v for k, v in received.items() if v}


def test_an_end_is_missing_on_either_side():
    """Forwards of the warm-up that nobody has asked for, and gradients that somebody expects already."""
    rest = [instruction for line in left_over(program_of("1f1b", layouts("1f1b")[1])) for instruction in line]
    assert {(type(x), x.message.direction) for x in rest} == {(Recv, "F"), (Send, "B")}


@pytest.mark.parametrize("schedule", QUICK)
def test_ranks_confirm_before_the_first_backward_and_publish_behind_the_last_forward(schedule):
    for line in program_of(schedule, layouts(schedule)[1]).ranks:
        kinds = [x.kind if isinstance(x, Compute) else str(x) if isinstance(x, Milestone) else "" for x in line]
        confirmed, published = kinds.index("CONFIRM"), kinds.index("PUBLISH")
        assert kinds[confirmed + 1] in ("I", "PUBLISH") and not {"I", "B", "W"} & {*kinds[:confirmed]}
        assert kinds[published - 1] in ("F", "CONFIRM") and "F" not in kinds[published:]
        assert confirmed < published


def test_a_program_without_backward_is_never_left():
    program = program_of("gpipe", Layout(((0,), (1,))), training=False)
    assert [begun(line) for line in program.ranks] == [list(line) for line in program.ranks]
    assert [sum(x == Publish() for x in line) for line in program.ranks] == [1, 1]
    assert left_over(program) == ((), ())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2", "chimera"])
def test_milestones_out_of_place_are_refused_by_the_law_they_break(schedule):
    """Every milestone of every rank is moved to every place; what stays inside its bounds is as right as before."""
    program = program_of(schedule, layouts(schedule)[0], m=4)
    for rank, line in enumerate(program.ranks):
        for mark in (Confirm(), Publish()):
            rest = [x for x in line if x != mark]
            for position in range(len(rest) + 1):
                moved = (*rest[:position], mark, *rest[position:])
                ranks = tuple(moved if r == rank else other for r, other in enumerate(program.ranks))
                if in_bounds(mark, rest[:position], rest[position:]):
                    verify(replace(program, ranks=ranks))
                else:
                    with pytest.raises(ProgramError, match=f'law "({mark.effects.law}|publish|step)"'):
                        verify(replace(program, ranks=ranks))


def in_bounds(mark, before, after) -> bool:
    kinds = {x.kind for x in before if isinstance(x, AnyCompute)}, {x.kind for x in after if isinstance(x, AnyCompute)}
    if not after:
        return False  # behind the optimizer's step
    if mark == Confirm():
        return kinds[0] <= {"F"} and not any(isinstance(x, Reduce) for x in before) and Publish() in after
    return "F" not in kinds[1] and Confirm() in before


def test_milestones_stand_once_on_all_ranks_or_on_none():
    program = program_of("1f1b", layouts("1f1b")[0])
    first, second = program.ranks
    without = tuple(x for x in second if x != Confirm())
    with pytest.raises(ProgramError, match='rank 1, at its end: law "confirm": missing CONFIRM'):
        verify(replace(program, ranks=(first, without)))
    at = second.index(Confirm())
    with pytest.raises(ProgramError, match='CONFIRM: law "confirm": it stands twice'):
        verify(replace(program, ranks=(first, (*second[:at], Confirm(), *second[at:]))))
    with pytest.raises(ProgramError, match='ROLLBACK: law "rollback": it follows a program that was left'):
        verify(replace(program, ranks=((Rollback(), *first), second)))
