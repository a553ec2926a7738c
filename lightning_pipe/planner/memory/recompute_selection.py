"""Recompute selection: the saved tensors of a stage, ranked by bytes freed per second of recomputation.

After Capuchin (Peng et al., ASPLOS 2020): tensors are ranked by MSPS, the memory they save per second of recomputing,
and sources are updated after every choice:

    seconds of a choice   those of the operations that run from what is kept (its sources) to it, and once more for
                          every choice before of which it is a source, which now goes through it
    dependants            a choice takes its own sources, and its seconds, to all that have it as a source
    bytes of a choice     its own, less those of arrived values that the stage has to hold for it and does not yet

A stage recomputes a tensor once per backward (`cost.activations`), so chains take less time than that; but what is made
in one go is in memory together, and the dearer figure keeps choices apart that would be.

Offloading enters as a price: within the free time of the copies it costs nothing and takes what is most expensive to
recompute; beyond, every byte costs one period a byte's copy, compared with MSPS choice by choice. Three micro-batches
or so are on their way or about to be used, so where memory is tightest what was offloaded is recomputed after all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.graph import Graph
from lightning_pipe.cost.activations import Memories
from lightning_pipe.cost.stage import StageWork
from lightning_pipe.planner.problem import MemoryPolicy

_NO_TIME = 1e-12  # seconds; for operations that were too quick to be measured


@dataclass(frozen=True)
class Choice:
    """One saved memory that is given up.

    Attributes:
        memory: its tensor.
        policy: how.
        bytes: bytes that the stage saves by it per micro-batch.
    """

    memory: int
    policy: MemoryPolicy
    bytes: float


@dataclass(frozen=True)
class Terms:
    """What giving up costs on the rank that decides for its stage.

    Attributes:
        samples: its samples of a micro-batch.
        memory_policies: what it may do.
        free_bytes: bytes per micro-batch that it can offload without waiting.
        bytes_per_s: bandwidth to its host.
        remade, offloaded: micro-batches of which the device is rid at its fullest moment, of what is recomputed and of
            what is offloaded.
    """

    samples: int
    memory_policies: frozenset[MemoryPolicy]
    free_bytes: float
    bytes_per_s: float
    remade: float
    offloaded: float


def choices(graph: Graph, work: StageWork, seconds: NDArray[np.float64], terms: Terms) -> list[Choice]:
    """Return what a stage should give up, in order; as much of it as memory asks for.

    A memory that comes again is given up by the later choice instead. O(saved tensors x operations of F).

    Args:
        graph: the step.
        work: the stage when all is kept.
        seconds: of every operation of the graph, on the rank that decides.
        terms: of that rank.
    """
    chooser = _Chooser(graph, work, seconds, terms)
    return [*chooser.free(), *chooser.paid(), *chooser.instead()]


class _Chooser:
    """Choices so far, and what the others still cost.

    Legend: rows are saved memories, as are columns of `_sources`; columns of `_holds` are arrived values.
    """

    def __init__(self, graph: Graph, work: StageWork, seconds: NDArray[np.float64], terms: Terms) -> None:
        needs = _Needs(graph, work)
        self._terms, self._memories = terms, work.saved
        self._bytes = np.array([float(graph.tensors[m].size(terms.samples)) for m in work.saved])
        self._held_bytes = np.array([float(graph.tensors[t].size(terms.samples)) for t in work.forward.given])
        self._cost_s = needs.of_memories(needs.runs) @ seconds[list(work.forward.operations)]
        self._sources, self._holds = needs.of_memories(needs.sources), needs.of_memories(needs.holds)
        self._holding = np.zeros(len(work.forward.given), dtype=bool)
        self._open = np.ones(len(work.saved), dtype=bool)
        self._remade, self._offloaded = ~self._open, ~self._open
        self._times = np.ones(len(work.saved))  # for which each would be made: for itself, and for those chosen before
        remakeable = needs.memories.remakeable if "recompute" in terms.memory_policies else frozenset()
        self._remakeable = np.array([m in remakeable for m in work.saved], dtype=bool)

    def free(self) -> list[Choice]:
        """Return what is offloaded in the copies' free time: most expensive to recompute first, then largest."""
        if "offload" not in self._terms.memory_policies or not self._terms.offloaded:
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
        by_copy = terms.offloaded * terms.bytes_per_s if "offload" in terms.memory_policies else 0.0
        while self._open.any():
            best, worth = self._worthiest(self._open)
            if by_copy > worth:
                found.append(self._offload(int(np.where(self._open, self._bytes, -1.0).argmax())))
            elif worth > 0:
                found.append(self._recompute(best))
            else:
                break
        return found

    def instead(self) -> list[Choice]:
        """Return what was offloaded, to be recomputed instead."""
        found = []
        while self._offloaded.any():
            best, worth = self._worthiest(self._offloaded)
            if worth <= 0:
                break
            found.append(self._recompute(best))
        return found

    def _worthiest(self, rows: NDArray[np.bool_]) -> tuple[int, float]:
        """Return which of these saves most per second when it is recomputed, and how much; zero if none saves any."""
        net = self._bytes - self._holds @ np.where(self._holding, 0.0, self._held_bytes)
        saved = np.where(rows & self._remakeable & (net > 0), net, 0.0)
        worth = self._terms.remade * saved / np.maximum(self._cost_s * self._times, _NO_TIME)
        best = int(worth.argmax())
        return best, float(worth[best])

    def _offload(self, row: int) -> Choice:
        self._open[row], self._offloaded[row] = False, True
        return Choice(self._memories[row], "offload", float(self._bytes[row]))

    def _recompute(self, row: int) -> Choice:
        """Choose one, and hand its sources and seconds to what it was a source of."""
        held = self._holds[row] & ~self._holding
        chosen = Choice(self._memories[row], "recompute", float(self._bytes[row] - self._held_bytes[held].sum()))
        self._open[row], self._offloaded[row] = False, False
        dependants = self._sources[:, row].copy()
        chosen_before = dependants & self._remade
        self._times -= self._sources[chosen_before].sum(axis=0)
        self._cost_s[dependants] += self._cost_s[row]
        self._sources[dependants] |= self._sources[row]
        self._holds[dependants] |= self._holds[row]
        self._sources[:, row] = False
        self._remade[row] = chosen_before[row] = True
        self._times += self._sources[chosen_before].sum(axis=0)
        self._holding |= held
        return chosen


class _Needs:
    """What has to run again, and to be there, so that each saved memory of a stage can be recomputed by itself.

    Attributes:
        runs: operation of F -> the operations that run up to it, when all that is saved is there.
        sources: operation of F -> the saved memories that these read.
        holds: operation of F -> the arrived values that these read and that are not saved.
    """

    def __init__(self, graph: Graph, work: StageWork) -> None:
        self.memories = Memories(graph, work)
        self._graph, self._work = graph, work
        self._column = {o: i for i, o in enumerate(work.forward.operations)}
        self._saved = {m: i for i, m in enumerate(work.saved)}
        self._arrived = {t: i for i, t in enumerate(work.forward.given)}
        count = len(self._column)
        self.runs = np.eye(count, dtype=bool)
        self.sources = np.zeros((count, len(self._saved)), dtype=bool)
        self.holds = np.zeros((count, len(self._arrived)), dtype=bool)
        for o, i in self._column.items():
            self._follow(o, i)

    def _follow(self, operation: int, column: int) -> None:
        """Note what an operation needs; operations come in order."""
        for t in self._graph.operations[operation].reads:
            maker, memory = self._column.get(self._graph.tensors[t].maker), self.memories.of(t)
            if self.memories.is_repeated(t):
                continue
            if memory in self._saved:
                self.sources[column, self._saved[memory]] = True
            elif t in self._arrived:
                self.holds[column, self._arrived[t]] = True
            elif maker is not None and memory not in self.memories.there:
                self.runs[column] |= self.runs[maker]
                self.sources[column] |= self.sources[maker]
                self.holds[column] |= self.holds[maker]

    def of_memories(self, needs: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return what the saved memories need: all operations of F that make something in them; none is its own."""
        found = np.zeros((len(self._saved), needs.shape[1]), dtype=bool)
        for t, tensor in enumerate(self._graph.tensors):
            row, maker = self._saved.get(self.memories.of(t)), self._column.get(tensor.maker)
            if row is not None and maker is not None:
                found[row] |= needs[maker]
        if needs is self.sources:
            np.fill_diagonal(found, False)
        return found
