"""Rewrites: milestones at which the step as a whole is looked at, or the head of the last stage runs.

F F F I W I W ... REDUCE0 STEP   ->   F F F CONFIRM HEAD PUBLISH I W I W ... REDUCE0 STEP
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pipe.core.milestones import Confirm, Head, Milestone, Publish, milestone_effects, ranks_at
from lightning_pipe.core.program import AnyCompute, Instruction, Program, Reduce, Step
from lightning_pipe.schedule.rules import stands_last


def add_confirmation(program: Program) -> Program:
    """Let every rank look before its first backward whether the step before was right (ranks that run ahead)."""
    return _with(program, Confirm())


def add_publication(program: Program) -> Program:
    """Let every rank tell its results once its last forward and its head are done, and a step before is confirmed."""
    return _with(program, Publish())


def add_head(program: Program) -> Program:
    """Let the ranks of the last stage run its head, if it has one. Runs when steps before are confirmed."""
    return program if program.traffic.head is None else _with(program, Head())


def _with(program: Program, added: Milestone) -> Program:
    """Add a milestone to its ranks, as late as what it precedes allows, or as early as what it follows does."""
    members, lines = ranks_at(added, program), []
    for rank, line in enumerate(program.ranks):
        position = _position(line, added, program)
        lines.append((*line[:position], added, *line[position:]) if rank in members else line)
    return replace(program, ranks=tuple(lines))


def _position(line: Sequence[Instruction], added: Milestone, program: Program) -> int:
    effects = milestone_effects(added)
    if effects.precedes and effects.holds(program):
        return next((i for i, x in enumerate(line) if _precedes(effects.precedes, x)), len(line))
    if stands_last(added, program):
        return len(line)
    if effects.stages is not None and len(ranks_at(added, program)) > 1:  # nobody waits for what others compute
        return next((i for i, x in enumerate(line) if _precedes((), x)), len(line))
    follows = effects.follows
    return max((i + 1 for i, x in enumerate(line) if _name(x) in follows and _is_of(x, program.batch)), default=0)


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
