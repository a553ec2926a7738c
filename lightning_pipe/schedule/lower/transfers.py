"""Transfers: sends right after the compute that makes them, receives one micro-batch ahead of their use.

The messages from one rank to another form a channel that keeps their order: the k-th send meets the k-th receive. The
computes fix the order of the sends; receives follow it, and are posted earlier where that is needed to do so.

A receive's place in the list is where its buffer is there, so that the message may begin to move. What else posting
costs is the transport's: nothing where the host carries messages. Where a device does (NCCL), the host launches the
receive only when a compute needs it, and the device starts it behind this place (`runtime.transport.device_works`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

from lightning_pipe.core.program import AnyCompute, Compute, Instruction, Message, Program, Recv, Send
from lightning_pipe.schedule.rules import Dataflow

Channel: TypeAlias = tuple[int, int]  # sender, receiver
# Computes between posting a receive and using it: F, I and W of one micro-batch. A message may then take as long as
# these together; with fewer, a short W in between leaves it too little time.
AHEAD = 3


def add_sends(program: Program, *, early_release: bool = True) -> Program:
    """Insert every `Send` right after the compute that makes its message. Runs when backwards are split.

    Args:
        program: computes, with reductions where wanted.
        early_release: False puts the sends of I after W of the same micro-batch.
    """
    flow = Dataflow.of(program)
    ranks = tuple(tuple(_with_sends(line, rank, flow, early_release)) for rank, line in enumerate(program.ranks))
    return replace(program, ranks=ranks)


def _with_sends(line: tuple[Instruction, ...], rank: int, flow: Dataflow, early_release: bool) -> Iterator[Instruction]:
    held: dict[tuple[int, int], tuple[Send, ...]] = {}
    for instruction in line:
        yield instruction
        if isinstance(instruction, AnyCompute) and instruction.is_joined:
            yield from (send for m in instruction.microbatches for send in held.pop((instruction.stage, m), ()))
        if not isinstance(instruction, Compute):
            continue
        sends = flow.gives(instruction, rank=rank)
        work = (instruction.stage, instruction.microbatch)
        if instruction.kind == "I" and not early_release:
            held[work] = sends
            continue
        yield from sends
        if instruction.kind == "W":
            yield from held.pop(work, ())


def add_receives(program: Program) -> Program:
    """Insert every `Recv` `AHEAD` computes before the compute that needs it, or earlier. Runs when sends are placed."""
    flow = Dataflow.of(program)
    sent = _sent(program)
    ranks = tuple(_with_receives(line, rank, flow, sent) for rank, line in enumerate(program.ranks))
    return replace(program, ranks=ranks)


def _sent(program: Program) -> Mapping[Channel, list[Message]]:
    """Return by channel the messages that are sent, in their order."""
    channels: dict[Channel, list[Message]] = defaultdict(list)
    for rank, line in enumerate(program.ranks):
        for instruction in line:
            if isinstance(instruction, Send):
                channels[rank, instruction.peer].append(instruction.message)
    return channels


def _with_receives(
    line: tuple[Instruction, ...], rank: int, flow: Dataflow, sent: Mapping[Channel, list[Message]]
) -> tuple[Instruction, ...]:
    computes = [(i, x) for i, x in enumerate(line) if isinstance(x, AnyCompute)]
    latest: dict[int, dict[Message, tuple[int, Recv]]] = defaultdict(dict)  # by sender, in order of first use
    for number, (_, compute) in enumerate(computes):
        if not isinstance(compute, Compute):
            continue  # joined W need no message
        position = computes[max(0, number - AHEAD)][0]  # before which a receive is posted at the latest
        for receive in flow.needs(compute, rank=rank).receives:
            latest[receive.peer][receive.message] = (position, receive)
    for receive in flow.awaited_later(rank=rank):
        latest[receive.peer][receive.message] = (computes[-1][0], receive)
    before: dict[int, list[Instruction]] = defaultdict(list)
    for sender, wanted in latest.items():
        queue = [wanted[message] for message in sent.get((sender, rank), ()) if message in wanted]
        positions = accumulate((position for position, _ in reversed(queue)), min)  # no later than its successors
        for (_, receive), position in zip(queue, reversed(list(positions)), strict=True):
            before[position].append(receive)
    return tuple(out for i, instruction in enumerate(line) for out in (*before.get(i, ()), instruction))
