"""Conditions of output: `if batch_idx % 10 == 0: print(...)`, where nothing but output depends on the answer.

While the step is traced such a question is answered so that the output is reached. The output is noted with what was
asked, and made in the batches for which the answer is that one.

Known are tests of comparisons and truth values that must all hold (`a and b`, `not a`, `not (a or b)`), in an `if`
without `else` that does nothing but output, and computes nothing for it that could change anything.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_pipe.capture.output.text_uses import is_between, parsed_file, says, statements_at

_ASKING = ("COMPARE_OP", "POP_JUMP", "UNARY_NOT", "TO_BOOL", "JUMP_IF")
_FUNCTIONS = frozenset("len str repr float int round abs max min sum type list tuple format sorted range zip".split())
_METHODS = frozenset(  # of tensors, texts and dicts: they change nothing
    "item mean sum max min std var norm abs float double half int long detach cpu size numel dim argmax argmin tolist "
    "numpy format join any all isnan isfinite isinf sqrt exp log ljust rjust center get items keys values".split()
)
_OUTPUTS = frozenset(
    "print pprint write warn warning info debug error critical exception echo rank_zero_info rank_zero_warn "
    "rank_zero_debug".split()
)
_CHANGES = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)


@dataclass(frozen=True)
class Condition:
    """A question in the test of an `if` that outputs alone.

    Attributes:
        frame: in which it is asked.
        lines: first and last line of the body of the `if`.
        place: of the question: lines and columns.
        answer: with which the output is reached.
    """

    frame: types.FrameType
    lines: tuple[int, int]
    place: tuple[int, ...]
    answer: bool


def condition_at(frame: types.FrameType | None) -> Condition | None:
    """Return the condition of output that code of a frame asks for; None if it asks for anything else."""
    while frame is not None and is_between(frame.f_code.co_filename):
        frame = frame.f_back
    place = None if frame is None else _places(frame.f_code).get(frame.f_lasti)
    if frame is None or place is None or (tree := parsed_file(frame)) is None:
        return None
    for statement, scope in statements_at(tree, *place[:2]):
        if isinstance(statement, ast.If) and _outputs_alone(statement, scope):
            answer = _needed(statement.test, place)
            if answer is not None:
                lines = (statement.body[0].lineno, statement.end_lineno or statement.lineno)
                return Condition(frame, lines, place, answer)
    return None


def conditions_around(frame: types.FrameType | None, asked: list[tuple[Condition, Any]]) -> list[tuple[Any, bool]]:
    """Return what was asked before code of a frame was reached, each with the answer that it needs."""
    found: list[tuple[Any, bool]] = []
    while frame is not None:
        found += [
            (question, condition.answer)
            for condition, question in asked
            if condition.frame is frame and condition.lines[0] <= frame.f_lineno <= condition.lines[1]
        ]
        frame = frame.f_back
    return found


@functools.lru_cache(maxsize=256)
def _places(code: types.CodeType) -> Mapping[int, tuple[int, ...]]:
    """Return where instructions that ask compare, or whose truth they ask for: by their offsets, lines and columns."""
    places: dict[int, tuple[int, ...]] = {}
    if sys.version_info >= (3, 11):  # before, Python does not keep columns
        for value, asking in itertools.pairwise(dis.get_instructions(code)):
            of = asking if asking.opname == "COMPARE_OP" else value
            if asking.opname.startswith(_ASKING) and of.positions is not None:
                line, end_line, column, end_column = (-1 if number is None else number for number in of.positions)
                places[asking.offset] = (line, column, end_line, end_column)
    return places


def _outputs_alone(statement: ast.If, scope: ast.AST) -> bool:
    """Return whether a statement does nothing but output under a condition."""
    if statement.orelse or not _changes_nothing(statement.test):
        return False
    return all(
        isinstance(inner, ast.Pass)
        or (isinstance(inner, ast.If) and _outputs_alone(inner, scope))
        or (isinstance(inner, ast.Expr | ast.Assign | ast.AugAssign) and says(inner, scope) and _changes_nothing(inner))
        for inner in statement.body
    )


def _changes_nothing(tree: ast.AST) -> bool:
    """Return whether code can change nothing, but for what it outputs."""
    output = tree.value if isinstance(tree, ast.Expr) else None
    return not any(
        isinstance(node, _CHANGES)
        or (isinstance(node, ast.Call) and not (_is_output(node) if node is output else _is_plain_call(node)))
        for node in ast.walk(tree)
    )


def _is_output(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(name):
            return name in _OUTPUTS
        case ast.Attribute(ast.Name("self"), name):
            return name == "print"
        case ast.Attribute(_, name):
            return name in _OUTPUTS
    return False


def _is_plain_call(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(name):
            return name in _FUNCTIONS
        case ast.Attribute(ast.Name("self"), _):  # a method of the user's
            return False
        case ast.Attribute(_, name):
            return name in _METHODS
    return False


def _needed(test: ast.expr, place: tuple[int, ...]) -> bool | None:
    """Return the answer to a question with which a test can hold; None where others need not be asked then."""
    path = next(_paths(test, place), None)
    if path is None:
        return None
    *around, asked = path
    holds = True
    for node in (*around, *([asked] if isinstance(asked, ast.UnaryOp) else [])):
        if isinstance(node, ast.UnaryOp):
            holds = not holds
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) is not holds:
            return None
    is_chain = isinstance(asked, ast.Compare) and len(asked.ops) > 1
    return None if is_chain and not holds else holds


def _paths(node: ast.expr, place: tuple[int, ...]) -> Iterator[list[ast.expr]]:
    """Yield the way through a test, by `and`, `or` and `not` alone, to what is asked at a place."""
    inner = node.values if isinstance(node, ast.BoolOp) else []
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = [node.operand]
    for child in inner:
        yield from ([node, *path] for path in _paths(child, place))
    if (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset) == place:
        yield [node]
