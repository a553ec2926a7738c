"""Which of the tensors that a stage saves should it give up first? Those that save most bytes per second.

After Capuchin (Peng et al., ASPLOS 2020): tensors are ranked by MSPS, the memory they save per second of recomputing,
and costs are updated after every choice. Two things differ from Capuchin because a stage makes a tensor anew at most
once per backward (`cost.activations`):

    seconds of a choice   = those of the operations that must run again and do not yet. What lies on the way to two
                            tensors is paid by the first, so a choice makes others cheaper; Capuchin, which drops what
                            it made again, makes them dearer
    bytes of a choice     = its own, less those of arrived values that the stage then has to hold and does not yet

Offloading enters as a price: within the free time of the copies it costs nothing and what is dearest to make anew goes;
beyond, every byte costs one period a byte's copy, compared with MSPS choice by choice.

Left out: what is made anew needs memory during I, until its last use.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.graph import Graph
from lightning_pipe.cost.activations import Memories
from lightning_pipe.cost.stage import StageWork
from lightning_pipe.planner.problem import Relief

_NO_TIME = 1e-12  # seconds; for operations that were too quick to be measured


@dataclass(frozen=True)
class Choice:
    """One saved memory that is given up.

    Attributes:
        memory: its tensor.
        relief: how.
        bytes: bytes that the stage saves by it per micro-batch.
    """

    memory: int
    relief: Relief
    bytes: float


@dataclass(frozen=True)
class Terms:
    """What giving up costs on the rank that decides for its stage.

    Attributes:
        samples: its samples of a micro-batch.
        reliefs: what it may do.
        free_bytes: bytes per micro-batch that it can offload without waiting.
        bytes_per_s: bandwidth to its host.
        remade, offloaded: micro-batches of which the device is rid at its fullest moment, of what is recomputed and of
            what is offloaded.
    """

    samples: int
    reliefs: frozenset[Relief]
    free_bytes: float
    bytes_per_s: float
    remade: float
    offloaded: float


def choices(graph: Graph, work: StageWork, seconds: NDArray[np.float64], terms: Terms) -> list[Choice]:
    """Return what a stage should give up, in order; as much of it as memory asks for.

    Takes seconds and bytes of the order of (saved tensors) x (operations of F).

    Args:
        graph: the step.
        work: the stage when all is kept.
        seconds: of every operation of the graph, on the rank that decides.
        terms: of that rank.
    """
    chooser = _Chooser(graph, work, seconds, terms)
    return [*chooser.free(), *chooser.paid()]


class _Chooser:
    """Choices so far, and what the others still cost.

    Legend: rows are saved memories; columns of `_runs` are operations of F, columns of `_holds` arrived values.
    """

    def __init__(self, graph: Graph, work: StageWork, seconds: NDArray[np.float64], terms: Terms) -> None:
        self._terms, self._memories = terms, np.array(work.saved, dtype=np.int64)
        self._bytes = np.array([float(graph.tensors[m].size(terms.samples)) for m in work.saved])
        self._open = np.ones(len(work.saved), dtype=bool)
        needs = _Needs(graph, work)
        self._runs, self._seconds = needs.runs(work.saved), seconds[list(work.forward.operations)]
        self._holds = needs.holds(work.saved)
        self._held_bytes = np.array([float(graph.tensors[t].size(terms.samples)) for t in work.forward.given])
        self._cost_s, self._net = self._runs @ self._seconds, self._bytes - self._holds @ self._held_bytes
        self._running, self._holding = self._runs[:0].any(axis=0), self._holds[:0].any(axis=0)
        remakeable = needs.memories.remakeable if "recompute" in terms.reliefs else frozenset()
        self._remakeable = np.array([m in remakeable for m in work.saved], dtype=bool)

    def free(self) -> list[Choice]:
        """Return what is offloaded in the free time of the copies: what is dearest to make anew, then the largest."""
        if "offload" not in self._terms.reliefs or not self._terms.offloaded:
            return []
        dear = np.where(self._remakeable, self._cost_s / np.maximum(self._bytes, 1.0), np.inf)
        room, found = self._terms.free_bytes, []
        for row in np.lexsort((-self._bytes, -dear)).tolist():
            if 0 < self._bytes[row] <= room:
                room -= self._bytes[row]
                found.append(self._offload(row))
        return found

    def paid(self) -> list[Choice]:
        """Return the others by what they save per second, recomputed or offloaded."""
        terms, found = self._terms, []
        by_copy = terms.offloaded * terms.bytes_per_s if "offload" in terms.reliefs else 0.0
        while self._open.any():
            saved = np.where(self._open & self._remakeable & (self._net > 0), self._net, 0.0)
            worth = terms.remade * saved / np.maximum(self._cost_s, _NO_TIME)
            best = int(worth.argmax())
            if by_copy > worth[best]:
                found.append(self._offload(int(np.where(self._open, self._bytes, -1.0).argmax())))
            elif worth[best] > 0:
                found.append(self._recompute(best))
            else:
                break
        return found

    def _offload(self, row: int) -> Choice:
        self._open[row] = False
        return Choice(int(self._memories[row]), "offload", float(self._bytes[row]))

    def _recompute(self, row: int) -> Choice:
        """Choose one, and take what it runs and holds off the costs of the others."""
        self._open[row] = False
        chosen = Choice(int(self._memories[row]), "recompute", float(self._net[row]))
        runs, holds = self._runs[row] & ~self._running, self._holds[row] & ~self._holding
        self._cost_s = self._cost_s - self._runs[:, runs] @ self._seconds[runs]
        self._net = self._net + self._holds[:, holds] @ self._held_bytes[holds]
        self._running, self._holding = self._running | runs, self._holding | holds
        return chosen


class _Needs:
    """What has to run again, and to be held, so that each saved memory of a stage can be made anew by itself."""

    def __init__(self, graph: Graph, work: StageWork) -> None:
        self.memories = Memories(graph, work)
        self._column = {o: i for i, o in enumerate(work.forward.operations)}
        self._arrived = {t: i for i, t in enumerate(work.forward.given)}
        self._graph, self._work = graph, work
        count = len(self._column)
        self._runs, self._holds = (
            np.zeros((count, count), dtype=bool),
            np.zeros((count, len(self._arrived)), dtype=bool),
        )
        for o, i in self._column.items():
            self._follow(o, i)
        self._makers: dict[int, set[int]] = {m: set() for m in work.saved}
        for t, tensor in enumerate(graph.tensors):
            if tensor.maker in self._column and self.memories.of(t) in self._makers:
                self._makers[self.memories.of(t)].add(self._column[tensor.maker])

    def _follow(self, operation: int, column: int) -> None:
        """Note what an operation needs when all that is saved is there; operations come in order."""
        self._runs[column, column] = True
        for t in self._graph.operations[operation].reads:
            maker = self._column.get(self._graph.tensors[t].maker)
            if self.memories.is_repeated(t) or self.memories.of(t) in self.memories.there:
                continue
            if t in self._arrived:
                self._holds[column, self._arrived[t]] = True
            elif maker is not None:
                self._runs[column] |= self._runs[maker]
                self._holds[column] |= self._holds[maker]

    def runs(self, saved: tuple[int, ...]) -> NDArray[np.bool_]:
        return self._together(self._runs, saved)

    def holds(self, saved: tuple[int, ...]) -> NDArray[np.bool_]:
        return self._together(self._holds, saved)

    def _together(self, needs: NDArray[np.bool_], saved: tuple[int, ...]) -> NDArray[np.bool_]:
        found = np.zeros((len(saved), needs.shape[1]), dtype=bool)
        for row, memory in enumerate(saved):
            found[row] = needs[sorted(self._makers[memory])].any(axis=0)
        return found
