"""Samples of a replica: computes of micro-batches of which it has none are left out."""

from __future__ import annotations

from dataclasses import replace

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import Compute, Instruction, Program
from lightning_pipe.schedule.rules import Dataflow


def drop_empty_computes(program: Program) -> Program:
    """Drop computes, and copies to the host, for which a rank holds the stage but has no samples. Runs first.

    A compute of a stage that the rank does not hold is left for `verify` to refuse.
    """
    flow = Dataflow.of(program)

    def has_samples(rank: int, instruction: Instruction) -> bool:
        if not isinstance(instruction, (Compute, OwnWork)) or rank not in program.layout.stages[instruction.stage]:
            return True
        return bool(flow.samples(instruction.stage, rank=rank, microbatch=instruction.microbatch))

    ranks = tuple(tuple(i for i in line if has_samples(rank, i)) for rank, line in enumerate(program.ranks))
    return replace(program, ranks=ranks)
