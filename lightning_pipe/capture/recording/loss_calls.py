"""Calls of torch by which a step makes its loss, as far as they tell how that depends on the samples of a batch.

Numbers tell once, on the first batch, how losses of micro-batches make that of the batch. A replayed step runs whatever
its Python does later; that it makes its loss by other calls by then is all that can be seen of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_REDUCTIONS = frozenset("sum nansum mean nanmean prod var std var_mean std_mean max min amax amin".split())


def loss_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a call in words: its function, and how it reduces."""
    if "reduction" in kwargs:
        return f"{name}(reduction={kwargs['reduction']!r})"
    if name in _REDUCTIONS and (len(args) > 1 or kwargs.keys() & {"dim", "axis"}):
        return f"{name} along a dimension"
    return name


def loss_calls(calls: Iterable[tuple[Any, str]]) -> dict[str, str]:
    """Return traced calls in words, and the first line of each.

    Args:
        calls: (name, arguments, pairs of keyword arguments), and a line.
    """
    found: dict[str, str] = {}
    for (name, args, kwargs), line in calls:
        found.setdefault(loss_call(name, args, dict(kwargs)), line)
    return found
