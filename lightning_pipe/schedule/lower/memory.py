"""Memory release: a stage forgets a micro-batch after its last compute, its head, and after posting its last send.

What was handed over to another stage of the same rank belongs to that stage and is not touched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from lightning_pipe.core.milestones import Milestone, milestone_effects
from lightning_pipe.core.program import AnyCompute, Free, Instruction, Program, Send


def add_frees(program: Program) -> Program:
    """Insert `Free` after the last use of every stage and micro-batch. Runs when sends and the head are placed."""
    return replace(program, ranks=tuple(_with_frees(line, program) for line in program.ranks))


def _with_frees(line: tuple[Instruction, ...], program: Program) -> tuple[Instruction, ...]:
    last: dict[tuple[int, int], int] = {}
    for i, instruction in enumerate(line):
        last |= dict.fromkeys(_works(instruction, last, program), i)
    ends: dict[int, list[Free]] = defaultdict(list)
    for work, i in ((work, i) for work, i in last.items() if work[1] < program.batch):
        ends[i].append(Free(*work))
    return tuple(out for i, instruction in enumerate(line) for out in (instruction, *ends.get(i, ())))


def _works(instruction: Instruction, present: Iterable[tuple[int, int]], program: Program) -> list[tuple[int, int]]:
    """Return stage and micro-batches whose values an instruction uses, of those present if it uses all of a stage."""
    match instruction:
        case AnyCompute():
            return [(instruction.stage, microbatch) for microbatch in instruction.microbatches]
        case Send(message, _):
            return [(message.source, message.microbatch)]
        case Milestone():
            stages = milestone_effects(instruction).stages
            return [] if stages is None else [work for work in present if work[0] in stages(program)]
        case _:
            return []
