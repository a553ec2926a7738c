"""The operations and tensors of a graph as arrays, so that many cuts can be looked at quickly.

Legend: arrays over operations or tensors are named after what they hold; a pair is two arrays of equal length.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.graph import Graph

Numbers: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Pairs: TypeAlias = tuple[Numbers, Numbers]


class GraphArrays:
    """Arrays over the operations (`o`), tensors (`t`), parameters (`p`) and repeated operations (`r`) of a graph.

    Args:
        graph: with its operations and tensors.

    Attributes:
        at, reach, backward, repeated: over operations, as `core.graph.Operation` says.
        unjoined: operations and tensors that no joined W can run, and read.
        sums: operations that only add terms of a gradient, in order.
        maker, base, of_state, per_sample, fixed: over tensors, as `core.graph.Tensor` says.
        of_batch, of_head: over tensors, whether one is a field of the batch, or made by the head.
        makes: over operations, the tensors that each makes.
        readers: over tensors, the placed operations that read each, in order; none for those of repeated operations.
        names: canonical names of the parameters.
        reads: pairs (o, t) of the placed operations and the tensors of placed operations or of the batch they read.
        repeats: pairs (o, r) of the placed operations and the repeated ones they need, directly or through others.
        parameters: pairs (o, p) of the placed operations and the parameters they or their repeated ones read.
        repeated_results: repeated operations that results need.
        overwritten: pairs of the backward operations and the names of overwritten state they read.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        operations, tensors = graph.operations, graph.tensors
        self.at = numbers(operation.at for operation in operations)
        self.reach = numbers(operation.reach for operation in operations)
        self.backward = np.array([operation.phase == "backward" for operation in operations], dtype=bool)
        self.repeated = np.array([operation.phase == "repeated" for operation in operations], dtype=bool)
        self.sums = [o for o, operation in enumerate(operations) if operation.adds_terms]
        self.unjoined = (
            np.array([not operation.joinable for operation in operations], dtype=bool),
            np.array([not tensor.joinable for tensor in tensors], dtype=bool),
        )
        self.maker = numbers(tensor.maker for tensor in tensors)
        self.of_head = np.zeros(len(tensors), dtype=bool)
        self.of_head[list(graph.head_makes)] = True
        self.of_batch: Mask = (self.maker < 0) & ~self.of_head
        self.base = numbers(tensor.base for tensor in tensors)
        self._repeated_tensors = {*np.flatnonzero((self.maker >= 0) & self.repeated[self.maker]).tolist()}
        self.of_state = np.array([tensor.of_state for tensor in tensors], dtype=bool)
        self.per_sample = np.array([tensor.bytes_per_sample for tensor in tensors], dtype=float)
        self.fixed = numbers(tensor.fixed_bytes for tensor in tensors)
        self.makes: list[list[int]] = [[] for _ in operations]
        for t, tensor in enumerate(tensors):
            if tensor.maker >= 0:
                self.makes[tensor.maker].append(t)
        self.names = tuple(graph.parameter_bytes)
        chains = self._chains()
        placed = [o for o, operation in enumerate(operations) if operation.phase != "repeated"]
        self.reads = pairs((o, t) for o in placed for t in operations[o].reads if t not in self._repeated_tensors)
        self.readers: list[list[int]] = [[] for _ in tensors]
        for o, t in listed(self.reads):
            self.readers[t].append(o)
        self.repeats = pairs((o, r) for o in placed for r in chains[o])
        number = {name: p for p, name in enumerate(self.names)}
        self.parameters = pairs(
            (o, number[name]) for o in placed for r in (o, *chains[o]) for name in operations[r].parameters
        )
        makers = [tensors[t].maker for t in graph.results if t in self._repeated_tensors]
        self.repeated_results = tuple(sorted({r for maker in makers for r in (maker, *chains[maker])}))
        mutated = frozenset(state for _, state in graph.updates)
        self.overwritten = [
            (o, state)
            for o, operation in enumerate(operations)
            if operation.phase == "backward"
            for state in (*operation.buffers, *operation.parameters)
            if state in mutated
        ]

    def _chains(self) -> list[frozenset[int]]:
        """Return, for every operation, the repeated operations whose results it needs, directly or through others."""
        chains: list[frozenset[int]] = []
        for operation in self.graph.operations:
            needed = [self.graph.tensors[t].maker for t in operation.reads if t in self._repeated_tensors]
            chains.append(frozenset(r for maker in needed for r in (maker, *chains[maker])))
        return chains


def numbers(values: Iterable[int]) -> Numbers:
    """Return integers as an array."""
    return np.fromiter(values, dtype=np.int64)


def pairs(values: Iterable[tuple[int, int]]) -> Pairs:
    """Return pairs as two arrays."""
    flat = np.array([*values], dtype=np.int64).reshape(-1, 2)
    return flat[:, 0], flat[:, 1]


def roots(base: Numbers) -> Numbers:
    """Return, for every tensor, the one whose memory it is a view of, through all views."""
    root = np.where(base >= 0, base, np.arange(len(base)))
    while not np.array_equal(root, root[root]):
        root = root[root]
    return root


def different(first: Numbers, second: Numbers) -> Pairs:
    """Return the different pairs, in order of the first, then the second."""
    least = int(second.min(initial=0))
    width = int(second.max(initial=0)) - least + 1
    found = np.unique(first * width + (second - least))  # one number for a pair: many times as fast as rows
    return found // width, found % width + least


def listed(values: Pairs) -> list[tuple[int, int]]:
    """Return two arrays as pairs."""
    return list(zip(values[0].tolist(), values[1].tolist(), strict=True))
