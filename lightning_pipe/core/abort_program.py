"""Abort of a program on all ranks together: how far each rank may be, and which messages are still due.

A rank that ran ahead learns before its first backward whether the step before was right (`runtime.ahead`). If it was
not, every rank stops there. Some messages are then posted by one end only: forwards that the receiver has not asked
for, and gradients that a receiver expects already. Channels keep their order, so both ends have posted a prefix of the
same messages, and whoever is behind posts the rest, with nothing in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from lightning_pipe.core.program import Compute, Instruction, Message, Program, Recv, Send


def first_backward(line: Sequence[Instruction]) -> int:
    """Return the position of the first backward of a rank; the end if it has none."""
    return next((i for i, x in enumerate(line) if isinstance(x, Compute) and x.kind in ("I", "B")), len(line))


def after_forwards(line: Sequence[Instruction]) -> int:
    """Return the position behind the last forward of a rank; 0 if it has none."""
    return max((i + 1 for i, x in enumerate(line) if isinstance(x, Compute) and x.kind == "F"), default=0)


def left_over(program: Program) -> tuple[tuple[Send | Recv, ...], ...]:
    """Return, for every rank, what it must post so that each message posted before the first backwards has two ends."""
    sent: dict[tuple[int, int], list[Message]] = defaultdict(list)  # by sender and receiver
    expected: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, line in enumerate(program.ranks):
        for instruction in line[: first_backward(line)]:
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
