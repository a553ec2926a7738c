"""Steps of the optimizer: last on every rank, once its reductions have ended."""

from __future__ import annotations

from dataclasses import replace

from lightning_pipe.core.program import Program, Step


def add_steps(program: Program) -> Program:
    """Append `Step` to every rank of a training program that synchronises. Runs last."""
    if not (program.training and program.synchronise):
        return program
    return replace(program, ranks=tuple((*line, Step()) for line in program.ranks))
