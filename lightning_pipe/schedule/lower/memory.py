"""When can a stage forget a micro-batch? After its last compute, and after posting its last send.

What was handed over to another stage of the same rank belongs to that stage and is not touched.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_pipe.core.program import Compute, Free, Instruction, Program, Send


def add_frees(program: Program) -> Program:
    """Insert `Free` after the last compute or send of every stage and micro-batch. Runs when sends are placed."""
    return replace(program, ranks=tuple(_with_frees(line) for line in program.ranks))


def _with_frees(line: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    last = {work: i for i, instruction in enumerate(line) if (work := _work(instruction))}
    ends = {i: Free(*work) for work, i in last.items()}
    return tuple(
        out for i, instruction in enumerate(line) for out in ((instruction, ends[i]) if i in ends else (instruction,))
    )


def _work(instruction: Instruction) -> tuple[int, int] | None:
    """Return stage and micro-batch whose values an instruction uses."""
    match instruction:
        case Compute(stage, _, microbatch):
            return stage, microbatch
        case Send(message, _):
            return message.source, message.microbatch
        case _:
            return None
