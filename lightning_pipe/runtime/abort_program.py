"""Abort of a program on all ranks together: what each rank still does once all leave it at a milestone.

A rank that ran ahead learns at `Confirm` whether the step before was right. If it was not, every rank stops there. Some
messages are then posted by one end only: forwards that the receiver has not asked for, and gradients that a receiver
expects already. Channels keep their order, so both ends have posted a prefix of the same messages, and whoever is
behind posts the rest, with nothing in it. Then the step is taken back (`Rollback`), and the program begins again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, takewhile

from lightning_pipe.core.milestones import Milestone
from lightning_pipe.core.program import Instruction, Message, Program, Recv, Send


def begun(line: Sequence[Instruction]) -> list[Instruction]:
    """Return what a rank has run when it comes to the milestone at which a program may be left; all if it has none."""
    return list(takewhile(lambda x: not (isinstance(x, Milestone) and x.effects.leaves), line))


def left_over(program: Program) -> tuple[tuple[Send | Recv, ...], ...]:
    """Return, for every rank that has left a program, the ends of messages that it still posts."""
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)  # by sender and receiver
    expected: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, line in enumerate(program.ranks):
        for instruction in begun(line):
            match instruction:
                case Send(message, peer):
                    sent[rank, peer].append(message)
                case Recv(message, peer):
                    expected[peer, rank].append(message)
    rest: list[list[Send | Recv]] = [[] for _ in program.ranks]
    for sender, receiver in dict.fromkeys(chain(sent, expected)):
        out, into = sent[sender, receiver], expected[sender, receiver]
        rest[sender].extend(Send(message, receiver) for message in into[len(out) :])
        rest[receiver].extend(Recv(message, sender) for message in out[len(into) :])
    return tuple(map(tuple, rest))
