"""Expressions of numbers that a step reads, and what must stay true of them: `Expression`, `NumberGuards`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

Number: TypeAlias = "int | float"
MOST_INPUTS = 64  # numbers that one graph reads; those beyond are guards


@dataclass(frozen=True)
class Situation:
    """What sources of numbers are read from, besides live Python state.

    Attributes:
        arguments: positional arguments of the step after the batch.
        numbers: Python numbers in the batch, in the order of its structure.
        texts: in the batch, in the same order.
        steps: optimizer steps between now and the batch's turn, of a batch that is looked at before that.
    """

    arguments: tuple[int, ...] = ()
    numbers: tuple[Number, ...] = ()
    texts: tuple[str, ...] = ()
    steps: int = 0


@dataclass(frozen=True)
class Source:
    """Where a number comes from; sources of one name are the same.

    Attributes:
        name: as the user would write it, such as `self.global_step`.
        read: returns its present value.
    """

    name: str
    read: Callable[[Situation], Number] = field(compare=False)


@dataclass(frozen=True)
class Expression:
    """A Python operation on numbers, expressions and sources."""

    operation: Callable[..., Any]
    operands: tuple[Any, ...]
    _hash: int = field(init=False, repr=False, compare=False)

    def __hash__(self) -> int:
        return self._hash

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.operation, self.operands)))


def evaluate(expression: Any, situation: Situation) -> Any:
    """Return the value of an expression, a source or a plain number."""
    if isinstance(expression, Source):
        return expression.read(situation)
    if isinstance(expression, Expression):
        return expression.operation(*(evaluate(operand, situation) for operand in expression.operands))
    return expression


def sources_in(expression: Any) -> Iterator[Source]:
    """Yield the sources of an expression."""
    if isinstance(expression, Source):
        yield expression
    elif isinstance(expression, Expression):
        for operand in expression.operands:
            yield from sources_in(operand)


class NumberOutput(Protocol):
    """Knows which uses of tracked numbers are output of the step alone, which no guard needs."""

    def text(self, number: Any, form: Callable[..., str], *args: str) -> str | None:
        """Return what stands for the text of a number that is output; None for any other text."""

    def answer(self, expression: Any) -> bool | None:
        """Return the answer to a question by which the step outputs alone; None to any other."""

    def check(self, expression: Any) -> None:
        """Check that a statement that outputs alone does not read a number that changes in every batch.

        Raises:
            CaptureError: if it does.
        """


@dataclass
class NumberGuards:
    """What a trace has found out about the numbers that it tracked.

    Attributes:
        values: expressions whose value, type included, must stay as it was; with the user's line.
        inputs: expressions that the graph reads, in the order of its vector of numbers.
        output: knows what the step only outputs; None where nothing is output.
    """

    values: dict[tuple[Any, Any], str] = field(default_factory=dict)
    inputs: dict[Any, int] = field(default_factory=dict)
    output: NumberOutput | None = None

    def pin(self, expression: Any, value: Any, line: str) -> None:
        """Require that an expression keeps its value."""
        self.values.setdefault((expression, _Exact(value)), line)

    def broken(self, situation: Situation) -> str:
        """Return what no longer has the value that it had, with its line; "" if everything has."""
        for (expression, exact), line in self.values.items():
            if (now := self._value(expression, situation)) != exact:
                names = ", ".join(dict.fromkeys(source.name for source in sources_in(expression)))
                return f"what depends on {names} was {exact.value!r} and is {now.value!r} now" + _at(line)
        return ""

    @staticmethod
    def _value(expression: Any, situation: Situation) -> _Exact:
        try:
            return _Exact(evaluate(expression, situation))
        except Exception as error:  # whatever the operation raises for these numbers, the step would raise too
            return _Exact(error)

    def input_names(self) -> list[str]:
        """Return, for each entry of the vector, the names of what it is computed from."""
        return [", ".join(dict.fromkeys(source.name for source in sources_in(one))) for one in self.inputs]

    def vector(self, situation: Situation) -> list[float]:
        """Return what the graph reads."""
        return [float(evaluate(expression, situation)) for expression in self.inputs]


class _Exact:
    """A value that equals only itself and equal ones of the same type; not-a-number equals itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Exact) or type(self.value) is not type(other.value):
            return False
        one, two = self.value, other.value
        return one is two or bool(one == two) or (one != one and two != two)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


def _at(line: str) -> str:
    return f" (at {line})" if line else ""
