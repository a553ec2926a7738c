"""Weight versions: what chooses the weights that a compute reads stands right before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_pipe.core.program import Compute, Instruction, Program
from lightning_pipe.schedule.rules import version_work


def add_versions(program: Program) -> Program:
    """Insert the own work that a round's seam asks for. Runs when backwards are split."""
    if program.seam is None or not program.seam.work:
        return program
    return replace(program, ranks=tuple(tuple(_chosen(line, program)) for line in program.ranks))


def _chosen(line: tuple[Instruction, ...], program: Program) -> Iterator[Instruction]:
    for instruction in line:
        if isinstance(instruction, Compute):
            yield from version_work(program, instruction)
        yield instruction
