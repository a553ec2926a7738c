"""Loads of the batch: ranks of loading stages read their own samples before the forward that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_pipe.core.program import Compute, Instruction, Program
from lightning_pipe.schedule.rules import Dataflow


def add_loads(program: Program) -> Program:
    """Insert `Load` before the F of every stage that reads the batch. Runs at any time."""
    flow = Dataflow.of(program)
    return replace(program, ranks=tuple(tuple(_with_loads(line, flow)) for line in program.ranks))


def _with_loads(line: tuple[Instruction, ...], flow: Dataflow) -> Iterator[Instruction]:
    for instruction in line:
        if isinstance(instruction, Compute):
            yield from flow.loads(instruction)
        yield instruction
