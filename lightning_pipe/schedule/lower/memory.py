"""Memory release: a stage forgets a micro-batch after its last compute and after posting its last send.

What was handed over to another stage of the same rank belongs to that stage and is not touched.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from lightning_pipe.core.program import AnyCompute, Free, Instruction, Program, Send


def add_frees(program: Program) -> Program:
    """Insert `Free` after the last compute or send of every stage and micro-batch. Runs when sends are placed."""
    return replace(program, ranks=tuple(_with_frees(line, program.batch) for line in program.ranks))


def _with_frees(line: tuple[Instruction, ...], batch: int) -> tuple[Instruction, ...]:
    last = {work: i for i, instruction in enumerate(line) for work in _works(instruction)}
    ends: dict[int, list[Free]] = defaultdict(list)
    for work, i in ((work, i) for work, i in last.items() if work[1] < batch):
        ends[i].append(Free(*work))
    return tuple(out for i, instruction in enumerate(line) for out in (instruction, *ends.get(i, ())))


def _works(instruction: Instruction) -> list[tuple[int, int]]:
    """Return stage and micro-batches whose values an instruction uses."""
    match instruction:
        case AnyCompute():
            return [(instruction.stage, microbatch) for microbatch in instruction.microbatches]
        case Send(message, _):
            return [(message.source, message.microbatch)]
        case _:
            return []
