"""Texts that are only said: printed, told to a logger or raised, so that nothing is decided by them.

A trace knows no values, and no sizes that vary, so the texts that it makes of them are not those of a run. That does no
harm in what a step says. Wherever else a text goes (a comparison, a look-up, an attribute), the graph would be wrong.

    print(f"loss {loss:.3f}")                              said
    text = str(loss.item()), read in such lines alone      said
    return f"{loss:.3f}"                                   as what the caller does with it
    if f"{n:.0f}" == "0", table.get(str(n), 1.0), ...      not

The statement is told by its place (in Python 3.10 by its line), and what it calls by its name.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
import sys
import types
from collections.abc import Iterator
from typing import Literal, TypeAlias

from lightning_pipe.capture.python.users_code import is_frameworks, is_installed, is_ours, users_frame

TextUse: TypeAlias = Literal["internal", "said", "used"]

_SAYING = re.compile("p?print|warn|info|debug|error|critical|exception|rank_zero|set_description|set_postfix|echo")
_WRITES = ("tqdm", "stdout", "stderr")  # whose `write` outputs
_OF_TENSORS = ("/torch/_tensor.py", "/torch/overrides.py", "/functional_tensor.py")
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def use_of_text(frame: types.FrameType | None) -> TextUse:
    """Return what is done with a text that is made in a frame.

    Args:
        frame: in which a tensor or number is asked for its text.

    Returns:
        "internal" where torch or another framework makes it, such as for its own log; "said" where the user's code only
        says it; else, also where its source is not known, "used".
    """
    while frame is not None and is_between(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is not None and is_frameworks(frame.f_code.co_filename):
        return "internal"
    return "said" if _is_only_said(frame) else "used"


def is_between(filename: str) -> bool:
    """Return whether a file belongs to what is between who asks for a text and the answer."""
    return is_ours(filename) or filename.endswith(_OF_TENSORS)


def _is_only_said(frame: types.FrameType | None) -> bool:
    while (frame := users_frame(frame)) is not None:
        tree = parsed_file(frame)
        statements = [] if tree is None else list(statements_at(tree, *_place(frame)))
        is_said = bool(statements) and all(says(statement, scope) for statement, scope in statements)
        returns = bool(statements) and all(isinstance(statement, ast.Return) for statement, _ in statements)
        if is_said or not (returns or is_installed(frame.f_code.co_filename)):
            return is_said
        frame = frame.f_back  # what the caller does with it; or a logger's handler, say, which is told as its caller
    return False


def parsed_file(frame: types.FrameType) -> ast.Module | None:
    """Return the syntax tree of the file that the code of a frame is in; None where there is none."""
    return _parsed("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))


@functools.lru_cache(maxsize=32)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:  # of something that is no Python of this version
        return None


def _place(frame: types.FrameType) -> tuple[int, int | None]:
    """Return line and column (of its bytes) of what a frame is at; None where Python does not keep columns."""
    if sys.version_info < (3, 11):
        return frame.f_lineno, None
    line, _, column, _ = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return (frame.f_lineno, None) if line is None else (line, column)


def statements_at(tree: ast.Module, line: int, column: int | None) -> Iterator[tuple[ast.stmt, ast.AST]]:
    """Yield the statements at a place, each with its function (or the module), but for definitions around it."""
    waiting: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    while waiting:
        node, scope = waiting.pop()
        is_definition = isinstance(node, (*_Function, ast.ClassDef))
        if isinstance(node, ast.stmt) and not is_definition and _is_at(node, line, column):
            yield node, scope
        inside = node if isinstance(node, _Function) else scope
        waiting.extend((child, inside) for child in ast.iter_child_nodes(node))


def _is_at(statement: ast.stmt, line: int, column: int | None) -> bool:
    """Return whether a place is in a statement; of one with others inside, in what it evaluates itself."""
    inner: list[ast.stmt] = getattr(statement, "body", None) or []
    start, end = (statement.lineno, statement.col_offset), (statement.end_lineno, statement.end_col_offset)
    if column is None:
        last = max(statement.lineno, inner[0].lineno - 1) if inner else statement.end_lineno
        return last is not None and statement.lineno <= line <= last
    return start <= (line, column) < ((inner[0].lineno, inner[0].col_offset) if inner else end)


def says(statement: ast.stmt, scope: ast.AST) -> bool:
    """Return whether a statement outputs what it evaluates, and does nothing else with it.

    Args:
        statement: the statement.
        scope: its function, or the module.
    """
    if any(isinstance(node, ast.NamedExpr) for node in ast.walk(statement)):
        return False
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        return len(names) == len(targets) and all(_is_read_to_be_said(name, scope) for name in names)
    return _is_said_at_once(statement)


def _is_said_at_once(statement: ast.AST) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return isinstance(statement, ast.Raise)
    called, files = statement.value.func, [key.value for key in statement.value.keywords if key.arg == "file"]
    if isinstance(called, ast.Attribute) and called.attr == "write":
        return _name(called.value) in _WRITES
    return _SAYING.match(_name(called)) is not None and all(_name(file) in _WRITES for file in files)


def _name(tree: ast.expr) -> str:
    """Return the last name in an expression."""
    return tree.attr if isinstance(tree, ast.Attribute) else tree.id if isinstance(tree, ast.Name) else ""


def _is_read_to_be_said(name: str, scope: ast.AST) -> bool:
    """Return whether a variable is local to a function, and nothing is done with it but that it is said."""
    nodes = list(ast.walk(scope))
    if not isinstance(scope, _Function) or any(
        isinstance(node, ast.Global | ast.Nonlocal) and name in node.names for node in nodes
    ):
        return False
    said = {id(part) for node in nodes if _is_said_at_once(node) for part in ast.walk(node)}
    reads = (n for n in nodes if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load))
    return all(id(read) in said for read in reads)
