"""Cut positions worth trying in a graph, and the values that cross them.

A cut position is an index into the forward order (`core.graph`), so every cut is convex: all nodes before it, all
others behind. Planners look at few positions: at all of a small graph, else in every slice of the work at the one that
the fewest bytes cross (`worthwhile`). The best plans are then moved to the positions between.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.graph import Graph
from lightning_pipe.core.program import Pass
from lightning_pipe.once import OncePerObject
from lightning_pipe.planner.problem import Problem

MOST_POSITIONS = 400


@dataclass(frozen=True)
class Crossing:
    """Bytes that cross every position of a graph in one direction, per sample and besides.

    What crosses is made by an operation on one side and read by an operation on the other, forward or backward. What
    is repeated where it is read does not cross, nor do terms of a parameter's gradient.
    """

    per_sample: NDArray[np.float64]
    fixed: NDArray[np.float64]

    def bytes(self, samples: float) -> NDArray[np.float64]:
        """Return the bytes at every position for so many samples."""
        found: NDArray[np.float64] = self.per_sample * samples + self.fixed
        return found

    def at(self, position: int, samples: float) -> float:
        """Return the bytes at one position for so many samples."""
        return float(self.per_sample[position] * samples + self.fixed[position])


def _crossing(graph: Graph) -> dict[Pass, Crossing]:
    size = len(graph.nodes) + 1
    places = [max(0, graph.operations[t.maker].at) if t.maker >= 0 else 0 for t in graph.tensors]
    for t in graph.head_makes:
        places[t] = len(graph.nodes)  # on the last stage, wherever that begins
    spans = [[place, place] for place in places]
    for t in graph.head_reads:
        spans[t][1] = len(graph.nodes)
    for operation in graph.operations:
        if operation.phase == "repeated" or operation.adds_terms:
            continue
        at = max(0, operation.at)
        for t in operation.reads:
            spans[t] = [min(spans[t][0], at), max(spans[t][1], at)]
    repeated = (t.maker >= 0 and graph.operations[t.maker].phase == "repeated" for t in graph.tensors)
    is_made_once = ~np.fromiter(repeated, dtype=bool, count=len(places))
    amounts = np.array([(t.bytes_per_sample, t.fixed_bytes) for t in graph.tensors], dtype=float)[is_made_once]
    place = np.array(places, dtype=int)[is_made_once]
    first, last = np.array(spans, dtype=int)[is_made_once].T
    return {"F": _between(amounts, place, last, size), "B": _between(amounts, first, place, size)}


crossing = OncePerObject(_crossing)
"""Return what crosses every position 0..len(nodes) of a graph: activations forward, gradients backward."""


def _between(amounts: NDArray[np.float64], begin: NDArray[np.int64], end: NDArray[np.int64], size: int) -> Crossing:
    """Return how much is on its way at every position, of amounts that go from one node to another."""
    changes = np.zeros((size + 1, 2))
    np.add.at(changes, begin + 1, amounts)
    np.subtract.at(changes, end + 1, amounts)
    sums = np.cumsum(changes, axis=0)[:size]
    return Crossing(np.ascontiguousarray(sums[:, 0]), np.ascontiguousarray(sums[:, 1]))


def crossing_bytes(graph: Graph, samples: int) -> list[int]:
    """Return, per position, the bytes that cross it for a micro-batch, forward and backward together."""
    found = crossing(graph)
    return [round(count) for count in found["F"].bytes(samples) + found["B"].bytes(samples)]


def worthwhile(problem: Problem, *, sliced: bool, most: int = MOST_POSITIONS) -> list[int]:
    """Return at most `most` positions to cut at, rising: the one with the least traffic of every slice of the work.

    Args:
        problem: the graph to be cut, with costs.
        sliced: whether stages may have different numbers of replicas, so that what crosses must be sliceable.
        most: positions wanted at most.
    """
    graph = problem.graph
    allowed = cuttable(graph, sliced=sliced)
    if len(allowed) <= most:
        return allowed
    traffic = crossing_bytes(graph, graph.samples)
    done = [0.0, *itertools.accumulate(problem.position_seconds)]
    best: dict[int, int] = {}
    for position in allowed:
        part = min(most - 1, int(done[position] / (done[-1] or 1.0) * most))
        if part not in best or traffic[position] < traffic[best[part]]:
            best[part] = position
    return sorted(best.values())


def cuttable(graph: Graph, *, sliced: bool) -> list[int]:
    """Return all positions at which the graph can be cut, rising.

    Args:
        graph: the graph.
        sliced: whether stages with different numbers of replicas may meet there.
    """
    forbidden = graph.uncuttable.keys() | (graph.unsliceable if sliced else frozenset())
    return [position for position in range(1, len(graph.nodes)) if position not in forbidden]


def nearby(positions: Sequence[int], cut: int, *, count: int) -> list[int]:
    """Return the positions nearest to a cut, `count` on each side, without the cut itself."""
    here = int(np.searchsorted(np.array(positions), cut))
    window = positions[max(0, here - count) : here + count + 1]
    return [position for position in window if position != cut]


def around(positions: Sequence[int], cuts: Sequence[int], *, most: int) -> list[int]:
    """Return cuts and the positions nearest to them, rising: about `most`, and at least one on each side of a cut."""
    each = max(1, most // (2 * max(1, len(cuts))))
    return sorted({*cuts, *(position for cut in cuts for position in nearby(positions, cut, count=each))})
