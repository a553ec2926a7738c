"""Stage cost table: costs of stages between all pairs of cut positions, as matrices.

A stage from bound a to bound b runs and holds what `cost.stage` says, nearly: sums over its positions, where what
several positions share (parameters, saved tensors, repeated operations) counts once per stage. It is counted where a
stage touches it first: an item used at units u1 < u2 < ... belongs to [a, b) if one of them does, so

    M[a, b] = sum over items and their uses u of  amount * [previous use < a <= u < b]

which is a sum over a rectangle of a table, and two cumulative sums give all pairs.

Left out, for the simulator to find: that a view shares the memory of a base made in the same stage only; that values
which skip stages do not cross the links between; what W keeps beside I; pieces of messages. Everything is for devices
of speed 1; samples may be any number, also fractions of a sample where replicas share few.

Legend: a, b bounds (0 is the start of the graph, the last its end); unit u lies between bounds u and u+1; n samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.profile import LEAST_SHARE, Profile
from lightning_pipe.core.program import Pass
from lightning_pipe.cost.tables import roots
from lightning_pipe.planner.candidates.cut_points import Crossing, crossing
from lightning_pipe.planner.problem import Problem

Matrix: TypeAlias = NDArray[np.float64]  # [a, b]


@dataclass(frozen=True)
class Amounts:
    """Bytes of every stage as a function of the samples."""

    per_sample: Matrix
    fixed: Matrix

    def all(self, samples: float) -> Matrix:
        """Return the bytes of all stages."""
        return self.per_sample * samples + self.fixed

    def at(self, a: int, b: int, samples: float) -> float:
        """Return the bytes of one stage."""
        return float(self.per_sample[a, b] * samples + self.fixed[a, b])


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of every stage as a function of the samples.

    Attributes:
        profile: tells how to read between measured numbers of samples.
        parts: seconds at each measured number of samples.
        call_s: seconds of the calls that run the stage, whatever the samples.
    """

    profile: Profile
    parts: tuple[Matrix, ...]
    call_s: float

    def all(self, samples: float) -> Matrix:
        """Return the seconds of all stages."""
        total = np.zeros_like(self.parts[0])
        for i, weight in self.profile.weights(samples):
            total += weight * self.parts[i]
        if len(self.parts) > 1:
            total = np.maximum(total, LEAST_SHARE * np.minimum.reduce(self.parts))
        return total + np.triu(np.full_like(total, self.call_s), k=1)

    def at(self, a: int, b: int, samples: float) -> float:
        """Return the seconds of one stage."""
        times = [float(part[a, b]) for part in self.parts]
        return self.profile.between(times, samples) + self.call_s


class StageCostTable:
    """Costs of every stage that some cut positions allow.

    Args:
        problem: graph and profile.
        positions: cut positions, rising, without 0 and the end of the graph.

    Attributes:
        bounds: graph position of every bound.
        crossing: bytes that cross every bound, by direction.
    """

    def __init__(self, problem: Problem, positions: Sequence[int]) -> None:
        graph = problem.graph
        self.problem = problem
        self.bounds = np.array([0, *positions, len(graph.nodes)])
        self._tables = problem.tables
        self._unit = np.searchsorted(self.bounds, np.maximum(self._tables.at, 0), side="right") - 1
        self.crossing: dict[Pass, Crossing] = {
            direction: Crossing(found.per_sample[self.bounds], found.fixed[self.bounds])
            for direction, found in crossing(graph).items()
        }
        self._unit_bytes: dict[float, NDArray[np.float64]] = {}

    @cached_property
    def coupled(self) -> NDArray[np.bool_]:
        """Return which units have nodes that mix samples."""
        names = set(self.problem.graph.coupled)
        found = np.zeros(self.units, dtype=bool)
        mixing = [position for position, node in enumerate(self.problem.graph.nodes) if node.name in names]
        found[np.searchsorted(self.bounds, mixing, side="right") - 1] = True
        return found

    @property
    def units(self) -> int:
        """Count the units between bounds."""
        return len(self.bounds) - 1

    @cached_property
    def forward_s(self) -> StageSeconds:
        """Return the seconds of F."""
        return self._times(backward=False, calls=1)

    @cached_property
    def backward_s(self) -> StageSeconds:
        """Return the seconds of I and W together."""
        return self._times(backward=True, calls=2)

    @cached_property
    def late_s(self) -> StageSeconds:
        """Return the seconds of W: what a stage does after its input gradient has left."""
        tables, profile = self._tables, self.problem.profile
        seconds = np.array(profile.seconds, dtype=float).reshape(-1, len(profile.samples))
        own = np.flatnonzero(~tables.repeated & tables.backward)
        flows = np.searchsorted(self.bounds, np.maximum(tables.reach[own], 0), side="right") - 1
        parts = []
        for column in range(seconds.shape[1]):
            table = np.zeros((self.units + 1, self.units))
            np.add.at(table, (flows + 1, self._unit[own]), seconds[own, column])
            parts.append(self.backward_s.parts[column] - self._rectangles(table))
        return StageSeconds(profile, tuple(parts), profile.call_s)

    def _times(self, *, backward: bool, calls: int) -> StageSeconds:
        tables, profile = self._tables, self.problem.profile
        seconds = np.array(profile.seconds, dtype=float).reshape(-1, len(profile.samples))
        own = np.flatnonzero(~tables.repeated & (tables.backward == backward))
        users, repeated = tables.repeats
        here = tables.backward[users] == backward
        items = np.concatenate([own, repeated[here]]).tolist()
        units = np.concatenate([self._unit[own], self._unit[users[here]]]).tolist()
        uses = _different(zip(items, units, strict=True))
        parts = (self._held_once(uses, seconds[[o for o, _ in uses], i].tolist()) for i in range(seconds.shape[1]))
        return StageSeconds(profile, tuple(parts), calls * profile.call_s)

    @cached_property
    def parameter_bytes(self) -> Matrix:
        """Return the bytes of the parameters that a stage reads."""
        sizes = [*self.problem.graph.parameter_bytes.values()]
        uses = self._parameter_uses
        return self._held_once(uses, [float(sizes[p]) for p, _ in _different(uses)])

    @cached_property
    def trained_bytes(self) -> Matrix:
        """Return the bytes of the parameters of a stage that have gradients."""
        return self._of_trained([float(size) for size in self.problem.graph.parameter_bytes.values()])

    @cached_property
    def trained_tensors(self) -> Matrix:
        """Return the number of the parameters of a stage that have gradients."""
        return self._of_trained([1.0] * len(self.problem.graph.parameter_bytes))

    def _of_trained(self, amounts: Sequence[float]) -> Matrix:
        trained = {name for _, name in self.problem.graph.gradients}
        is_trained = [name in trained for name in self._tables.names]
        uses = [(p, u) for p, u in self._parameter_uses if is_trained[p]]
        return self._held_once(uses, [amounts[p] for p, _ in _different(uses)])

    @cached_property
    def _parameter_uses(self) -> list[tuple[int, int]]:
        operations, parameters = self._tables.parameters
        return list(zip(parameters.tolist(), self._unit[operations].tolist(), strict=True))

    @cached_property
    def state_bytes(self) -> Matrix:
        """Return the bytes of parameters, gradients, optimizer state, versions and buffers of a stage."""
        optimizer = 1.0 + self.problem.profile.optimizer.held_bytes_per_byte + self.problem.copies
        buffers = float(sum(self.problem.graph.buffer_bytes.values()))
        return self._upper(self.parameter_bytes + optimizer * self.trained_bytes + buffers)

    @cached_property
    def step_s(self) -> Matrix:
        """Return the seconds of the optimizer step of a stage."""
        costs = self.problem.profile.optimizer
        per_tensor = self.trained_tensors * costs.seconds_per_tensor
        return self._upper(costs.fixed_s + self.trained_bytes * costs.seconds_per_byte + per_tensor)

    @cached_property
    def saved_bytes(self) -> Amounts:
        """Return the bytes that a stage saves for the backward of a micro-batch."""
        tables, graph = self._tables, self.problem.graph
        root = roots(tables.base)
        operations, read = tables.reads
        of_forward = tables.of_batch | (~tables.backward[tables.maker] & (tables.maker >= 0))
        repeated = (tables.maker >= 0) & tables.repeated[tables.maker]
        held = of_forward & ~tables.of_state[root] & ~repeated[root]
        saves = tables.backward[operations] & held[read]
        uses = list(zip(root[read[saves]].tolist(), self._unit[operations[saves]].tolist(), strict=True))
        tensors = [graph.tensors[t] for t, _ in _different(uses)]
        return Amounts(
            self._held_once(uses, [t.bytes_per_sample for t in tensors]),
            self._held_once(uses, [float(t.fixed_bytes) for t in tensors]),
        )

    def largest_saved(self, a: int, b: int, samples: float) -> float:
        """Return the most bytes that one unit of a stage saves."""
        units = np.arange(a, b)
        saved = self.saved_bytes
        return float((saved.per_sample[units, units + 1] * samples + saved.fixed[units, units + 1]).max())

    def peak_bytes(self, samples: float, held: int) -> Matrix:
        """Return the bytes of every stage with so many micro-batches in flight, without workspace and messages."""
        return self.state_bytes + held * self.saved_bytes.all(samples)

    def workspace_bytes(self, a: int, b: int, samples: float) -> float:
        """Return the most bytes that one operation of a stage reads and makes, beside what is saved.

        A lower bound of what computes need beside what they keep: what lives longer than one operation and is not saved
        is left out.
        """
        if samples not in self._unit_bytes:
            per_sample, fixed = self._operation_bytes
            self._unit_bytes[samples] = np.zeros(self.units)
            np.maximum.at(self._unit_bytes[samples], self._unit, per_sample * samples + fixed)
        return float(self._unit_bytes[samples][a:b].max())

    @cached_property
    def _operation_bytes(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return what every operation makes, and reads of what nobody saves: per sample and besides."""
        tables, graph = self._tables, self.problem.graph
        owned = tables.base < 0
        operations, read = tables.reads
        saved = np.zeros(len(graph.tensors), dtype=bool)
        saved[read[tables.backward[operations]]] = True
        saved &= tables.of_batch | (~tables.backward[tables.maker] & (tables.maker >= 0))
        transient = (tables.maker >= 0) & owned & ~saved & ~tables.of_state
        found = []
        for amounts in (tables.per_sample, tables.fixed.astype(float)):
            total = np.zeros(len(graph.operations))
            np.add.at(total, tables.maker[transient], amounts[transient])
            reads = transient[read]
            np.add.at(total, operations[reads], amounts[read[reads]])
            found.append(total)
        return found[0], found[1]

    def _held_once(self, uses: Iterable[tuple[int, int]], amounts: Sequence[float]) -> Matrix:
        """Return, per stage, the sum over the items that it uses; amounts belong to the different (item, unit)."""
        size = self.units
        table = np.zeros((size + 1, size))
        previous: dict[int, int] = {}
        for (item, unit), amount in zip(_different(uses), amounts, strict=True):
            table[previous.get(item, -1) + 1, unit] += amount
            previous[item] = unit
        return self._rectangles(table)

    def _rectangles(self, table: NDArray[np.float64]) -> Matrix:
        """Return, per stage [a, b), the sum of table[i, u] over i <= a <= u < b."""
        sums = np.zeros((self.units + 1, self.units + 1))
        np.cumsum(np.cumsum(table, axis=0), axis=1, out=sums[:, 1:])
        return self._upper(sums - np.diagonal(sums)[:, None])

    def _upper(self, matrix: Matrix) -> Matrix:
        """Return a matrix with zeros where no stage is."""
        return np.triu(matrix, k=1)


def _different(uses: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    return sorted(set(uses))
