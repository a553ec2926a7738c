"""From where to where the values live that one half of a stage makes.

The memory of a view is that of its base, if the half makes both. A memory begins with the operation that makes it and
ends with the last that reads it or a view of it; what outlives the half ends with the half, and a term of a gradient
with the operation after which the gradient is added to those that are there.

Legend: place an operation's index within the half, -1 if it is elsewhere; arrays over tensors are named after what
they hold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from lightning_pipe.cost.stage import HalfWork
from lightning_pipe.cost.tables import GraphArrays, Mask, Numbers, Pairs, numbers, roots

NOTHING_DUE: Mapping[str, list[int]] = MappingProxyType({})


@dataclass(frozen=True)
class Lives:
    """The memories that a half makes.

    Attributes:
        memories: tensors, each the base of all that shares its memory.
        begins, ends: places of the operations that make each, and that use it last; the number of operations if it
            outlives the half.
        memory: over all tensors, the memory of each that the half makes; -1 for others.
        complete: by parameter, the place of the operation with which the half has the gradient, if it makes all alone.
    """

    memories: Numbers
    begins: Numbers
    ends: Numbers
    memory: Numbers
    complete: Mapping[str, int]


class Lifetimes:
    """Find the lives of the values of halves of one graph.

    Args:
        tables: the graph as arrays.
    """

    def __init__(self, tables: GraphArrays) -> None:
        operations = tables.graph.operations
        self._tables = tables
        self._reads = _Rows([operation.reads for operation in operations])
        self._readers: list[list[int]] = [[] for _ in tables.maker]  # but sums of terms, which are no use of them
        for o, operation in enumerate(operations):
            for t in () if operation.adds_terms else operation.reads:
                self._readers[t].append(o)
        self._root, self._levels = roots(tables.base), _levels(tables.base)

    def of(self, half: HalfWork, *, kept: Collection[int] = (), due: Mapping[str, list[int]] = NOTHING_DUE) -> Lives:
        """Return the lives of the values that a half makes.

        Args:
            half: its operations in order, each once.
            kept: tensors that it is given, so that nobody reads them where an operation makes them again beside others.
            due: by parameter, the terms of the gradients that are complete with it.
        """
        place = np.full(len(self._tables.graph.operations), -1)
        place[list(half.operations)] = np.arange(len(half.operations))
        at = np.where(self._tables.maker < 0, -1, place[self._tables.maker])
        made = self._made(at)
        memory = np.where(made, self._root, -1)
        last = np.full(len(at), -1)
        by, read = self._reads.of(half.operations)
        counts = made[read]
        if kept:
            counts &= ~np.isin(read, list(kept))
        np.maximum.at(last, memory[read[counts]], by[counts])
        np.maximum.at(last, memory[made], at[made])
        complete = self._complete(place, due)
        added = {t: end for name, end in complete.items() for t in due[name]}
        left = numbers(t for t in half.outputs if made[t])
        np.maximum.at(last, memory[left], numbers(added.get(t, len(half.operations)) for t in left.tolist()))
        memories = np.flatnonzero(made & (self._root == np.arange(len(at))))
        return Lives(memories, at[memories], last[memories], memory, complete)

    def _made(self, at: Numbers) -> Mask:
        """Return which tensors have memory that the half makes: no views of state, or of what it was given."""
        base = self._tables.base
        made: Mask = (at >= 0) & ~self._tables.of_state
        for level in self._levels:  # bases before their views
            made[level] &= made[base[level]] & (at[base[level]] <= at[level])
        return made

    def _complete(self, place: Numbers, due: Mapping[str, list[int]]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, terms in due.items():
            makers = [place[maker] if (maker := self._tables.maker[t]) >= 0 else -1 for t in terms]
            if min(makers) >= 0 and all(place[o] >= 0 for t in terms for o in self._readers[t]):
                found[name] = int(max(makers))
        return found


class _Rows:
    """Lists of numbers, one behind the other, of which many are taken at once."""

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self._values = numbers(value for row in rows for value in row)
        self._counts = numbers(map(len, rows))
        self._starts = np.cumsum(self._counts) - self._counts

    def of(self, chosen: Sequence[int]) -> Pairs:
        """Return pairs (index among the chosen rows, value) of the rows that are chosen."""
        rows = np.array(chosen, dtype=np.int64)
        counts = self._counts[rows]
        before = np.cumsum(counts) - counts
        index = np.repeat(np.arange(len(rows)), counts)
        return index, self._values[np.repeat(self._starts[rows] - before, counts) + np.arange(len(index))]


def _levels(base: Numbers) -> list[Numbers]:
    """Return the views by their distance from the memory that they are views of, nearest first."""
    at, found = np.arange(len(base)), []
    is_root = base < 0
    views = np.flatnonzero(~is_root)
    while len(views):
        at = np.where(base[at] >= 0, base[at], at)
        near = views[is_root[at[views]]]
        found.append(near)
        views = np.setdiff1d(views, near)
    return found
