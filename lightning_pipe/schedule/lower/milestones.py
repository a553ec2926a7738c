"""Rewrites: milestones at which the step as a whole is looked at.

F F F I W I W ... REDUCE0 STEP   ->   F F F CONFIRM PUBLISH I W I W ... REDUCE0 STEP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pipe.core.milestones import Confirm, Milestone, Publish, milestone_effects
from lightning_pipe.core.program import AnyCompute, Instruction, Program, Reduce, Step


def add_confirmation(program: Program) -> Program:
    """Let every rank look before its first backward whether the step before was right (ranks that run ahead)."""
    return _with(program, Confirm())


def add_publication(program: Program) -> Program:
    """Let every rank tell its results once its last forward is done, and once a step before is confirmed."""
    return _with(program, Publish())


def _with(program: Program, added: Milestone) -> Program:
    """Add a milestone to every rank, as late as what it precedes allows, or as early as what it follows does."""
    ranks = []
    for line in program.ranks:
        position = _position(line, added, program.batch)
        ranks.append((*line[:position], added, *line[position:]))
    return replace(program, ranks=tuple(ranks))


def _position(line: Sequence[Instruction], added: Milestone, batch: int) -> int:
    effects = milestone_effects(added)
    if effects.precedes:
        return next((i for i, x in enumerate(line) if _precedes(effects.precedes, x)), len(line))
    return max((i + 1 for i, x in enumerate(line) if _name(x) in effects.follows and _is_of(x, batch)), default=0)


def _is_of(x: Instruction, batch: int) -> bool:
    """Return whether an instruction belongs to the batch, not to one behind it."""
    return not isinstance(x, AnyCompute) or min(x.microbatches) < batch


def _precedes(names: Sequence[str], later: Instruction) -> bool:
    return isinstance(later, Reduce | Step) or _name(later) in names


def _name(instruction: Instruction) -> str:
    match instruction:
        case AnyCompute():
            return instruction.kind
        case Milestone():
            return instruction.code
        case _:
            return ""
