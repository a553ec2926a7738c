"""Expressions of sizes as rows of names and numbers, and back: by a table of constructors, never by a name's lookup.

    ["integer", 3]  ["rational", 1, 2]  ["float", 0.5]  ["constant", "true"]  ["symbol", "s0", {"positive": true, ...}]
    ["Add", 0, 3]                       a constructor, and the rows of its operands, which stand before

Classes of sympy evaluate texts that they are called with. None of these constructors is called with anything but
expressions of earlier rows; a name becomes a symbol and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy

from lightning_pipe.capture.torch_private import SIZE_FUNCTIONS

_OF_SYMPY = (
    sympy.Add, sympy.Mul, sympy.Pow, sympy.Abs, sympy.floor, sympy.ceiling, sympy.Max, sympy.Min, sympy.Mod, sympy.Eq,
    sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And, sympy.Or, sympy.Not,
)  # fmt: skip
_CONSTRUCTORS: Mapping[str, Any] = {
    **{kind.__name__: kind for kind in _OF_SYMPY},
    **{f"torch.{name}": kind for name, kind in SIZE_FUNCTIONS.items()},
}
_NAMES = {kind: name for name, kind in _CONSTRUCTORS.items()}
_CONSTANTS: Mapping[str, Any] = {"true": sympy.true, "false": sympy.false, "oo": sympy.oo, "-oo": -sympy.oo}


class UnknownExpression(Exception):
    """An expression has something that no row can hold; the text says what."""


class ExpressionRows:
    """Rows of all expressions of a graph, each once.

    Attributes:
        rows: as they are written.
    """

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._built: list[sympy.Basic] = []
        self._numbers: dict[tuple[type, Any], int] = {}

    def number(self, expression: sympy.Basic) -> int:
        """Return the number of an expression's row.

        Raises:
            UnknownExpression: if it would not be read back equal.
        """
        key = type(expression), expression
        if key not in self._numbers:
            row = self._row(expression)
            built = _built(row, self._built)
            if type(built) is not type(expression) or built != expression:
                raise UnknownExpression(f"{expression} would be read as {built}")
            self._numbers[key] = len(self.rows)
            self.rows.append(row)
            self._built.append(built)
        return self._numbers[key]

    def _row(self, expression: Any) -> list[Any]:
        for name, constant in _CONSTANTS.items():
            if expression is constant:
                return ["constant", name]
        match expression:
            case sympy.Integer():
                return ["integer", int(expression)]
            case sympy.Rational():
                return ["rational", int(expression.p), int(expression.q)]
            case sympy.Float():
                return ["float", float(expression)]
            case sympy.Symbol():
                return ["symbol", expression.name, dict(sorted(expression.assumptions0.items()))]
        if type(expression) not in _NAMES:
            raise UnknownExpression(f"{expression} is of {type(expression).__name__}")
        return [_NAMES[type(expression)], *map(self.number, expression.args)]


def expressions_of(rows: Iterable[list[Any]]) -> list[sympy.Basic]:
    """Return the expressions of rows.

    Raises:
        ValueError, KeyError, TypeError, IndexError: if they are none.
    """
    built: list[sympy.Basic] = []
    for row in rows:
        built.append(_built(row, built))
    return built


def _built(row: list[Any], earlier: list[sympy.Basic]) -> Any:
    kind, *content = row
    match kind:
        case "constant":
            return _CONSTANTS[content[0]]
        case "integer":
            return sympy.Integer(_exactly(int, content[0]))
        case "rational":
            return sympy.Rational(*(_exactly(int, part) for part in content))
        case "float":
            return sympy.Float(_exactly(float, content[0]))
        case "symbol":
            name, assumptions = content
            if not name.isidentifier():  # as it would become code, where a size is an argument
                raise ValueError(f"{name!r} is no name of a symbol")
            return sympy.Symbol(name, **{key: _exactly(bool, value) for key, value in assumptions.items()})
    return _CONSTRUCTORS[kind](*(earlier[_exactly(int, number)] for number in content))


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"found {value!r}; expected a {kind.__name__}")
    return value
