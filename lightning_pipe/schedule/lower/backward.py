"""Backward split into its input half and its weight half, so that the gradient can leave between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_pipe.core.program import Compute, Instruction, Program
from lightning_pipe.schedule.rules import halves


def split_backward(program: Program) -> Program:
    """Replace every B by I and W. Runs before anything is placed relative to them."""
    return replace(program, ranks=tuple(tuple(_split(line)) for line in program.ranks))


def _split(line: tuple[Instruction, ...]) -> Iterator[Instruction]:
    for instruction in line:
        if isinstance(instruction, Compute):
            yield from halves(instruction)
        else:
            yield instruction
