"""What a step returns and logs, by place: numbers that depend on the samples, tensors with rows of samples."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from lightning_pipe.capture.steps.metric_result import is_result
from lightning_pipe.capture.steps.record import KeptState, LogCall, ObjectCall, OutputCall, Ref, Sized
from lightning_pipe.capture.steps.trees import branches

Call: TypeAlias = LogCall | ObjectCall
Place: TypeAlias = tuple[str, ...]  # where a number stands: in what was returned, or in a call, and there
RETURNED: Place = ("returned",)
KEPT = "kept"
VALUE = "value of the call"
LENGTH = "number of items"


def sized(value: torch.SymInt | torch.SymFloat) -> Sized:
    """Return a symbolic number as a function of the number of samples."""
    return _sized(value.node.expr, int if isinstance(value, torch.SymInt) else float)


def sized_at(one: Sized, sizes: Mapping[sympy.Symbol, sympy.Integer]) -> Sized | int | float:
    """Return a number that depends on sizes with numbers for some of them."""
    number = int if one.expression.is_integer else float
    now = one.expression.xreplace(sizes)
    return _sized(now, number) if now.free_symbols else number(now)


def _sized(expression: sympy.Expr, number: type[int] | type[float]) -> Sized:
    symbols = list(expression.free_symbols)
    return Sized(lambda samples: number(expression.xreplace(dict.fromkeys(symbols, samples))), expression)


def call_keys(calls: Sequence[Call]) -> tuple[Place, ...]:
    """Return what tells calls of one run apart, and is the same in other runs: name and occurrence."""
    counts: Counter[Place] = Counter()
    keys = []
    for call in calls:
        what: Place = ("log" if isinstance(call, LogCall) else type(call).__name__, call.name)
        keys.append((*what, str(counts[what])))
        counts[what] += 1
    return tuple(keys)


@dataclass(frozen=True)
class SaidLeaf:
    """One thing that a step returns, logs or gives to a metric.

    Attributes:
        place: where it stands.
        name: the same for a reader.
        line: the user's line; "" if it is not known.
        value: a number, a stand-in, or whatever it is.
    """

    place: Place
    name: str
    line: str
    value: Any

    def __str__(self) -> str:
        """Return where it is said, in words."""
        return f"{self.name} at {self.line}" if self.line else self.name


def leaves_said(returned: Any, calls: Sequence[Call], kept: Sequence[KeptState] = ()) -> Iterator[SaidLeaf]:
    """Yield all that a step has returned, logged and given to metrics, and what it keeps."""
    for place, value in placed_leaves(returned, RETURNED):
        inner = ".".join(place[len(RETURNED) :])
        yield SaidLeaf(place, f"what it returns{f' as {inner!r}' if inner else ''}", "", value)
    for key, call in zip(call_keys(calls), calls, strict=True):
        name = repr(call.name) if isinstance(call, LogCall) else f"{call.name}()"
        said = {VALUE: call.value if isinstance(call, LogCall) else call.args, **call.kwargs}
        for place, value in placed_leaves(said, key):
            yield SaidLeaf(place, name, call.line, value)
    for one in kept:
        for place, value in placed_leaves(one.value, (KEPT, one.name)):
            yield SaidLeaf(place, f"what it keeps in {one.name}", "", value)


def lists_said(
    returned: Any, calls: Sequence[Call], kept: Sequence[KeptState] = ()
) -> Iterator[tuple[Place, Sequence[Any]]]:
    """Yield the lists, and tuples without names, in what a step returns, keeps, and gives to metrics and loggers."""
    yield from _lists(returned, RETURNED)
    for one in kept:
        yield from _lists(one.value, (KEPT, one.name))
    for key, call in zip(call_keys(calls), calls, strict=True):
        if not isinstance(call, LogCall):
            for number, argument in enumerate(call.args):
                yield from _lists(argument, (*key, VALUE, str(number)))
            for name, argument in call.kwargs.items():
                yield from _lists(argument, (*key, name))


def is_under(place: Place, lists: Collection[Place]) -> bool:
    """Return whether a place is one of these lists, or lies in one."""
    return any(place[: len(one)] == one for one in lists)


def numbers_said(returned: Any, calls: Sequence[Call]) -> dict[Place, float]:
    """Return the numbers, but for truth values, in what a step has returned and logged, by place."""
    return {leaf.place: float(leaf.value) for leaf in leaves_said(returned, calls) if is_number(leaf.value)}


def sizes_said(returned: Any, calls: Sequence[Call], results: Sequence[torch.Tensor]) -> dict[Place, tuple[int, ...]]:
    """Return the shapes of the tensors, and the lengths of the lists, that a step has returned and logged, by place.

    Args:
        returned: what it has returned.
        calls: what it has logged.
        results: the tensors that both refer to.
    """
    sizes: dict[Place, tuple[int, ...]] = {}
    for leaf in leaves_said(returned, calls):
        tensor = leaf.value
        if isinstance(tensor, Ref) and tensor.name.isdigit():
            tensor = results[int(tensor.name)]
        if isinstance(tensor, torch.Tensor) and not is_result(tensor):
            sizes[leaf.place] = tuple(tensor.shape)
    return sizes | {(*place, LENGTH): (len(one),) for place, one in lists_said(returned, calls)}


def rows_said(sizes: Sequence[Mapping[Place, tuple[int, ...]]], counts: Sequence[int]) -> dict[Place, int]:
    """Return, by place, the dimension along which what a step says has rows of samples, as all runs show it.

    Args:
        sizes: shapes that were said in each run.
        counts: samples of each run.
    """
    if len({*counts}) < 2:
        return {}
    rows: dict[Place, int] = {}
    for place, shape in sizes[0].items():
        for dim, size in enumerate(shape):
            expected = [(*shape[:dim], size * count / counts[0], *shape[dim + 1 :]) for count in counts]
            if size and [run.get(place) for run in sizes] == expected:
                rows[place] = dim
                break
    return rows


def proportional(numbers: Sequence[Mapping[Place, float]], counts: Sequence[int]) -> frozenset[Place]:
    """Return the places of numbers that are in proportion to the samples in all runs; micro-batches add up to them."""
    if len({*counts}) < 2:
        return frozenset()
    first = numbers[0]

    def is_size(place: Place) -> bool:
        per_sample = first[place] / counts[0]
        return bool(per_sample) and all(
            place in run and math.isclose(run[place] / count, per_sample, rel_tol=1e-9)
            for run, count in zip(numbers, counts, strict=True)
        )

    return frozenset(filter(is_size, first))


def keyed_outputs(outputs: Sequence[OutputCall]) -> dict[Place, OutputCall]:
    """Return calls of output functions by what tells them apart in every run: function, line, unit and occurrence."""
    counts: Counter[Place] = Counter()
    calls: dict[Place, OutputCall] = {}
    for call in outputs:
        what: Place = ("output", call.name, call.line, str(call.position))
        key = (*what, str(counts[what]))
        calls[key] = call
        counts[what] += 1
    return calls


def output_leaves(outputs: Sequence[OutputCall], results: Sequence[torch.Tensor]) -> dict[Place, Any]:
    """Return what a run has output, by place: texts, numbers, and the shapes of tensors.

    Args:
        outputs: its calls of output functions.
        results: the tensors that these refer to.
    """
    return {
        place: results[int(value.name)].shape if isinstance(value, Ref) and value.name.isdigit() else value
        for key, call in keyed_outputs(outputs).items()
        for place, value in placed_leaves((call.args, call.kwargs), key)
        if isinstance(value, (Ref, str, int, float))
    }


def is_number(value: Any) -> bool:
    """Return whether a value is a number of Python's, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _lists(value: Any, place: Place) -> Iterator[tuple[Place, Sequence[Any]]]:
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        yield place, value
    for key, item in (branches(value) or {}).items():
        yield from _lists(item, (*place, str(key)))


def placed_leaves(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    """Yield the leaves of a tree, which stands at a place, by their own places."""
    if (inside := branches(value)) is not None:
        for key, item in inside.items():
            yield from placed_leaves(item, (*place, str(key)))
    else:
        yield place, value
