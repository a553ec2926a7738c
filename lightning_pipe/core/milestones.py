"""Milestones: places in the programs of ranks at which something happens to the step as a whole, once.

Ranks look whether the step before was right, or tell what they have found; those of the last stage run its head. A
milestone is declared by its effects, as own work is (`core.effects`), and what reads programs needs no other word:

    @milestone
    @dataclass(frozen=True, order=True)
    class Publish(Milestone):
        code: ClassVar[str] = "PUBLISH"
        effects: ClassVar[MilestoneEffects] = MilestoneEffects(law="publish", follows=("F", "CONFIRM"))

What a rank does there is a handler that whoever runs the program gives (`runtime.milestones`); the head is the
runtime's own (`runtime.exchanges.batch_heads`).

    program of a rank that runs ahead    F F F CONFIRM PUBLISH I W F I W I W ... REDUCE0 STEP
    what it runs once it has left it     1RECV_F2<0@0[0:2] ... ROLLBACK
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from lightning_pipe.core.effects import check_declared, declare

if TYPE_CHECKING:
    from lightning_pipe.core.program import Program

M = TypeVar("M", bound="type[Milestone]")


@dataclass(frozen=True)
class MilestoneEffects:
    """What a milestone does to its rank.

    Attributes:
        law: the law of `verify` that it is named under.
        follows: kinds of computes of which none comes after it, and codes of milestones that stand before it where a
            program has both.
        precedes: kinds of computes of which none comes before it; nor does a sum then.
        awaits_steps: whether its rank waits there until all ranks have ended the step before.
        leaves: whether ranks may leave the program there, all of them or none (`runtime.abort_program`).
        in_abort: whether it stands in what ranks run once they have left a program, and nowhere else.
        label: of its place in drawings; "" is not drawn.
        stages: the stages whose ranks come to it, all of them together; they wait there for each other. What it follows
            and precedes are then computes of these stages. None: all ranks come to it or none does, and nobody waits.
        holds: whether what it precedes comes after it in a program.
    """

    law: str
    follows: tuple[str, ...] = ()
    precedes: tuple[str, ...] = ()
    awaits_steps: bool = False
    leaves: bool = False
    in_abort: bool = False
    label: str = ""
    stages: Callable[[Program], tuple[int, ...]] | None = None
    holds: Callable[[Program], bool] = lambda program: True


@dataclass(frozen=True, order=True)
class Milestone:
    """A place in the program of every rank, declared by its effects."""

    code: ClassVar[str]
    effects: ClassVar[MilestoneEffects]

    def __str__(self) -> str:
        return self.code


MILESTONES: dict[str, type[Milestone]] = {}
_CODE = re.compile(r"(?!STEP$)[A-Z]{2,}")


def milestone(kind: M) -> M:
    """Make a milestone known to what reads programs; errors are those of `declare`."""
    declare(kind, MILESTONES, effects=MilestoneEffects, code=_CODE, word="milestone")
    return kind


def milestone_effects(instruction: Milestone) -> MilestoneEffects:
    """Return the effects of a milestone.

    Raises:
        ProgramError: if it was not made known by `milestone`.
    """
    kind = type(instruction)
    check_declared(kind, MILESTONES, word="milestone", decorator="milestone")
    return kind.effects


def ranks_at(milestone: Milestone, program: Program) -> frozenset[int]:
    """Return the ranks that come to a milestone."""
    stages, layout = milestone_effects(milestone).stages, program.layout
    groups = layout.stages if stages is None else [layout.stages[stage] for stage in stages(program)]
    return frozenset(rank for ranks in groups for rank in ranks)


@milestone
@dataclass(frozen=True, order=True)
class Confirm(Milestone):
    """Look whether the optimizer step before was right, which a rank that runs ahead learns late.

    It stands before the first backward, because the answer needs the end of that step on all ranks, which on the last
    ranks is up to a pipeline's depth later (optimizer post-validation, after Qi et al. 2023, "Zero Bubble Pipeline
    Parallelism", section 4). If it was wrong, all ranks leave the program there (`Rollback`).
    """

    code: ClassVar[str] = "CONFIRM"
    effects: ClassVar[MilestoneEffects] = MilestoneEffects(
        law="confirm", precedes=("B", "I", "W"), awaits_steps=True, leaves=True, label="the step before is right"
    )


def _stages_with_head(program: Program) -> tuple[int, ...]:
    return () if program.traffic.head is None else (len(program.layout.stages) - 1,)


def _holds_backwards(program: Program) -> bool:
    return program.training and program.traffic.head is not None and program.traffic.head.holds_backwards


@milestone
@dataclass(frozen=True, order=True)
class Head(Milestone):
    """Run the head of the last stage: once, on values that all of its forwards of the batch have made.

    Replicas of the stage give each other their samples' values there, and run the same. Backwards of the stage wait for
    it, but where it only makes results (`HeadTraffic.holds_backwards`). A step that is taken back has not run it.
    """

    code: ClassVar[str] = "HEAD"
    effects: ClassVar[MilestoneEffects] = MilestoneEffects(
        law="head",
        follows=("F", "CONFIRM"),
        precedes=("B", "I", "W"),
        label="what needs all samples",
        stages=_stages_with_head,
        holds=_holds_backwards,
    )


@milestone
@dataclass(frozen=True, order=True)
class Publish(Milestone):
    """Begin to tell the results of all forwards of this rank (loss, logged values), while the backwards run."""

    code: ClassVar[str] = "PUBLISH"
    effects: ClassVar[MilestoneEffects] = MilestoneEffects(law="publish", follows=("F", "CONFIRM", "HEAD"))


@milestone
@dataclass(frozen=True, order=True)
class Rollback(Milestone):
    """Take the optimizer step before back, and take it as it should have been."""

    code: ClassVar[str] = "ROLLBACK"
    effects: ClassVar[MilestoneEffects] = MilestoneEffects(law="rollback", in_abort=True)
