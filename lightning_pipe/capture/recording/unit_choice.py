"""Choice of the calls of sub-modules that become the units of a step.

Large, so that little glue is repeated and few values travel, but small enough to be spread evenly over the parts. A
module is a unit wherever it is called (outside of other units), or nowhere; what is said of it holds for its longest
call:

* A call without parameters is glue, repeated by every rank that needs it, unless it takes more than 5 % of the step's
  time and more than a millisecond.
* The calls of the step itself are units. Unless these can be divided among the parts so that the largest part is at
  most a quarter larger than the mean, the largest unit that is more than half a part, and has inside it calls with
  parameters or more than a third of its time, is opened: its own code becomes glue, and the calls inside it units.
* So on, until the parts are even or nothing is left to open. The size of a unit is the mean of its shares of the
  forward seconds and of the parameters.
* With deterministic algorithms no time enters: every start has the same units.

The module itself, torchmetrics objects and parametrizations of weights (which belong to the layer whose weight they
make) are no calls.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torchmetrics
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lightning_pipe.lightning_names import pl

_SMALL = 1 / 2  # of a part: units up to this are not opened
_EVEN = 1.25  # largest part over the mean
_INNER_SHARE = 1 / 3
_GLUE_SHARE, _GLUE_S = 0.05, 1e-3


@dataclass
class UnitCall:
    """One call of a sub-module.

    Attributes:
        path: its path; "" for the step itself.
        parameters: numbers in its parameters.
        seconds: how long it took.
        inner: calls inside it.
    """

    path: str
    parameters: int
    seconds: float = 0.0
    inner: list[UnitCall] = field(default_factory=list)

    def walk(self) -> Iterator[UnitCall]:
        """Yield the call and all inside it, in the order of their beginning."""
        yield self
        for call in self.inner:
            yield from call.walk()


def call_paths(module: pl.LightningModule) -> dict[int, str]:
    """Return the path, by identity, of every sub-module whose calls may be units."""
    no_calls = (torchmetrics.Metric, torchmetrics.MetricCollection, ParametrizationList)
    hidden = {id(part) for m in module.modules() if isinstance(m, no_calls) for part in m.modules()}
    return {id(m): path for path, m in module.named_modules() if path and id(m) not in hidden}


@contextlib.contextmanager
def recording_tree(module: pl.LightningModule, settle: Callable[[], object]) -> Iterator[UnitCall]:
    """Record the tree of the calls that are made inside.

    Args:
        module: whose sub-modules are called.
        settle: waits until the device has done what it was told, so that times are its own.
    """
    paths = call_paths(module)
    sizes = {id(m): sum(p.numel() for p in m.parameters()) for m in module.modules()}
    root = UnitCall("", sizes[id(module)])
    is_timed = not torch.are_deterministic_algorithms_enabled()
    open_calls = [root]
    original = nn.Module.__call__

    def record(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(called))
        if path is None:
            return original(called, *args, **kwargs)
        call = UnitCall(path, sizes[id(called)])
        open_calls[-1].inner.append(call)
        open_calls.append(call)
        settle()
        begin = time.perf_counter()
        try:
            return original(called, *args, **kwargs)
        finally:
            settle()
            call.seconds = is_timed * (time.perf_counter() - begin)
            open_calls.pop()

    begin = time.perf_counter()
    with mock.patch.object(nn.Module, "__call__", record):
        yield root
    settle()
    root.seconds = is_timed * (time.perf_counter() - begin)


def faster(one: UnitCall, two: UnitCall) -> UnitCall:
    """Return the calls of two runs with the shorter time of each; the second run's if they made other calls."""
    if [call.path for call in one.walk()] != [call.path for call in two.walk()]:
        return two
    inner = [faster(a, b) for a, b in zip(one.inner, two.inner, strict=True)]
    return replace(two, seconds=min(one.seconds, two.seconds), inner=inner)


def choose(
    root: UnitCall, parts: int, opened: frozenset[str] = frozenset(), *, closed: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Return the paths of the sub-modules whose calls are units.

    Args:
        root: the tree of calls.
        parts: number of parts among which the units will be divided.
        opened: paths that are no units.
        closed: paths that are not opened for the sake of balance.
    """
    calls: dict[str, list[UnitCall]] = defaultdict(list)
    for call in root.walk():
        calls[call.path].append(call)
    possible = {path for path in calls if path and not _is_glue(calls[path], root)}
    opened = frozenset({"", *opened})
    while True:
        chosen = frozenset(_outermost(root, possible - opened))
        units = units_of(root, chosen)
        sizes = _sizes(units, root)
        largest: dict[str, float] = {}
        for unit, size in zip(units, sizes, strict=True):
            if size > _SMALL / parts and unit.path not in closed and _can_be_opened(calls[unit.path]):
                largest[unit.path] = max(size, largest.get(unit.path, 0.0))
        if not largest or _largest_part(sizes, parts) <= _EVEN * sum(sizes) / parts:
            return chosen
        opened |= {max(largest, key=largest.__getitem__)}


def around(call: UnitCall, chosen: frozenset[str]) -> frozenset[str]:
    """Return the paths of the calls inside which units are called."""
    inner = frozenset[str]().union(*(around(one, chosen) for one in call.inner if one.path not in chosen))
    return inner | {call.path} if inner or any(one.path in chosen for one in call.inner) else inner


def _is_glue(calls: list[UnitCall], root: UnitCall) -> bool:
    longest = max(call.seconds for call in calls)
    return not calls[0].parameters and longest <= max(_GLUE_SHARE * root.seconds, _GLUE_S)


def _can_be_opened(calls: list[UnitCall]) -> bool:
    return any(i.parameters or i.seconds > _INNER_SHARE * c.seconds for c in calls for i in c.inner)


def _sizes(units: list[UnitCall], root: UnitCall) -> list[float]:
    """Return the sizes of units, as shares of the step; parameters count at the first call."""
    seen: set[str] = set()
    sizes = []
    for unit in units:
        parameters = 0 if unit.path in seen else unit.parameters
        seen.add(unit.path)
        sizes.append((unit.seconds / (root.seconds or 1.0) + parameters / (root.parameters or 1)) / 2)
    return sizes


def _largest_part(sizes: list[float], parts: int) -> float:
    """Return the largest part when units in their order are divided as evenly as possible (linear partition)."""
    sums = list(itertools.accumulate(sizes, initial=0.0))
    best = sums[1:]
    for _ in range(parts - 1):
        best = [min([best[k], *(max(best[j], sums[k + 1] - sums[j + 1]) for j in range(k))]) for k in range(len(sizes))]
    return best[-1] if best else 0.0


def _outermost(call: UnitCall, chosen: set[str]) -> Iterator[str]:
    """Yield the chosen paths that are called outside of other chosen ones."""
    for inner in call.inner:
        if inner.path in chosen:
            yield inner.path
        else:
            yield from _outermost(inner, chosen)


def units_of(call: UnitCall, chosen: frozenset[str]) -> list[UnitCall]:
    """Return the calls that are units, in their order."""
    if call.path in chosen:
        return [call]
    return [unit for inner in call.inner for unit in units_of(inner, chosen)]
