"""Effects of an instruction as data, and the base class of instructions that are declared by them.

A rank's *own work* is what it does for one stage and micro-batch without another rank: loading, forgetting, copying to
the host, and whatever a new technique needs (remaking, keeping a version of the weights). Each is a class in one file:

    @own_work
    @dataclass(frozen=True, order=True)
    class Evict(OwnWork):
        code: ClassVar[str] = "EVICT"                        # written 2EVICT0: stage 2, micro-batch 0
        effects: ClassVar[Effects] = Effects(law="offload", after=("F",), resource="out", ...)

What reads programs (text, `verify`, deadlock, simulator, memory, trace, plot, report) reads `effects` and needs no word
about it. What a rank does and what it costs are a handler (`runtime.handlers`) and a price (`core.prices`): one that is
missing is an error that names the instruction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from lightning_pipe.errors import ProgramError

if TYPE_CHECKING:
    from lightning_pipe.core.program import Program

Resource = Literal["compute", "out", "back"]  # the rank itself, and its lanes of copies to the host and back
C = TypeVar("C", bound="type[OwnWork]")


@dataclass(frozen=True)
class Effects:
    """What an instruction does to its rank. All that it refers to is of the same stage and micro-batch.

    Attributes:
        law: the law of `verify` that it is named under.
        after: what stands before it: kinds of computes ("F") and codes of other own work ("EVICT"), whose end it
            awaits where they take time.
        before: kinds of computes that come after it and wait for its end; B is I and W.
        resource: what it occupies while it takes time; None takes no time and has no price.
        bytes: 1 if the rank holds more from its place in the list on, -1 if it holds less from its end on, by the bytes
            of its price and until the first backward has ended; 0 if memory stays as it is.
        ends: whether nothing of the stage and micro-batch, no compute and no send, may come after it.
        stages: which stages need it, once for every micro-batch; None if it may stand once, or not at all.
        is_optional: whether a micro-batch of these stages may do without it, and without all others of its law.
        demand: what a rank must have for it, in words of an error.
        verb: what it does twice, in words of an error.
        label, colour: of its bars in drawings; "" is not drawn.
    """

    law: str
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    resource: Resource | None = None
    bytes: Literal[-1, 0, 1] = 0
    ends: bool = False
    stages: Callable[[Program], Iterable[int]] | None = None
    is_optional: bool = False
    demand: str = "has no such work"
    verb: str = "done"
    label: str = ""
    colour: str = ""


@dataclass(frozen=True, order=True)
class OwnWork:
    """Work of one rank for one stage and micro-batch, declared by its effects."""

    code: ClassVar[str]
    effects: ClassVar[Effects]

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.code}{self.microbatch}"


OWN_WORK: dict[str, type[OwnWork]] = {}
_CODE = re.compile(r"[A-Z]{2,}")


def declare(kind: type, registry: dict[str, Any], *, effects: type, code: re.Pattern[str], word: str) -> None:
    """Enter a class of instructions into the registry of its family.

    Args:
        kind: the class.
        registry: of the family, by code.
        effects: what its effects are.
        code: how its code is written.
        word: for it in errors.

    Raises:
        ProgramError: if its code or its effects are not declared, or another one is written the same.
    """
    name, given, own = kind.__name__, getattr(kind, "code", None), getattr(kind, "effects", None)
    if not isinstance(own, effects):
        raise ProgramError(f"The {word} {name} declares no effects; give it `effects = {effects.__name__}(...)`.")
    if not isinstance(given, str) or not code.fullmatch(given):
        raise ProgramError(f"The {word} {name} has the code {given!r}; expected two or more capitals.")
    if registry.setdefault(given, kind) is not kind:
        raise ProgramError(f"The {word} {name} is written {given}, as {registry[given].__name__} is.")


def check_declared(kind: type, registry: dict[str, Any], *, word: str, decorator: str) -> None:
    """Check that a class of instructions is in the registry of its family.

    Raises:
        ProgramError: if it is not.
    """
    if registry.get(getattr(kind, "code", "")) is not kind:
        raise ProgramError(f"The {word} {kind.__name__} is not known; decorate it with `{decorator}`.")


def own_work(kind: C) -> C:
    """Make an instruction known to what reads programs; errors are those of `declare`."""
    declare(kind, OWN_WORK, effects=Effects, code=_CODE, word="instruction")
    return kind


def effects_of(instruction: OwnWork) -> Effects:
    """Return the effects of an instruction.

    Raises:
        ProgramError: if it was not made known by `own_work`.
    """
    kind = type(instruction)
    check_declared(kind, OWN_WORK, word="instruction", decorator="own_work")
    return kind.effects
