"""Milestones: places in the program of every rank at which something happens to the step as a whole, once.

Ranks look whether the step before was right, or tell what they have found. A milestone is declared by its effects, as
own work is (`core.effects`), and what reads programs needs no other word about it:

    @milestone
    @dataclass(frozen=True, order=True)
    class Publish(Milestone):
        code: ClassVar[str] = "PUBLISH"
        effects: ClassVar[MilestoneEffects] = MilestoneEffects(law="publish", follows=("F", "CONFIRM"))

What a rank does there is a handler that whoever runs the program gives (`runtime.milestones`).

    program of a rank that runs ahead    F F F CONFIRM PUBLISH I W F I W I W ... REDUCE0 STEP
    what it runs once it has left it     1RECV_F2<0@0[0:2] ... ROLLBACK
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from lightning_pipe.core.effects import check_declared, declare

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
    """

    law: str
    follows: tuple[str, ...] = ()
    precedes: tuple[str, ...] = ()
    awaits_steps: bool = False
    leaves: bool = False
    in_abort: bool = False
    label: str = ""


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


@milestone
@dataclass(frozen=True, order=True)
class Publish(Milestone):
    """Begin to tell the results of all forwards of this rank (loss, logged values), while the backwards run."""

    code: ClassVar[str] = "PUBLISH"
    effects: ClassVar[MilestoneEffects] = MilestoneEffects(law="publish", follows=("F", "CONFIRM"))


@milestone
@dataclass(frozen=True, order=True)
class Rollback(Milestone):
    """Take the optimizer step before back, and take it as it should have been."""

    code: ClassVar[str] = "ROLLBACK"
    effects: ClassVar[MilestoneEffects] = MilestoneEffects(law="rollback", in_abort=True)
