"""Laws of leaving a program before its first backward."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest

from lightning_pipe.core.abort_program import after_forwards, first_backward, left_over
from lightning_pipe.core.program import Compute, Edge, Layout, Recv, Send, VerifiedProgram
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
    return verify(lower(order, layout=layout, sizes=(6,) * m, traffic=traffic, training=training))


def layouts(schedule: str) -> list[Layout]:
    return [SCHEDULES[schedule].layout([(rank,) for rank in range(p)]) for p in (2, 4)]


def channels(program: VerifiedProgram) -> tuple[dict, dict]:
    """Return what both ends of every channel post until the program is given up, in order."""
    sent, received = defaultdict(list), defaultdict(list)
    for rank, (line, rest) in enumerate(zip(program.ranks, left_over(program), strict=True)):
        for instruction in (*line[: first_backward(line)], *rest):
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
def test_positions_are_before_the_first_backward_and_behind_the_last_forward(schedule):
    for line in program_of(schedule, layouts(schedule)[1]).ranks:
        kinds = [x.kind if isinstance(x, Compute) else "" for x in line]
        begun, done = first_backward(line), after_forwards(line)
        assert kinds[begun] == "I" and not {"I", "B", "W"} & {*kinds[:begun]}
        assert kinds[done - 1] == "F" and "F" not in kinds[done:]


def test_a_program_without_backward_is_never_left():
    program = program_of("gpipe", Layout(((0,), (1,))), training=False)
    assert [first_backward(line) for line in program.ranks] == [len(line) for line in program.ranks]
    assert left_over(program) == ((), ())
