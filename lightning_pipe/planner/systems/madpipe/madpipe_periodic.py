"""Periodic schedules of least period for an allocation: modulo scheduling by integer programming.

Phase 2 of MadPipe (`madpipe_chain`). Every operation o (F and B of each stage, and the message of each between
different processors) starts in every period at the share x_o of it, on micro-batches h_o later than the first forward:

    o before q, same micro-batch    x_q + h_q >= x_o + h_o + d_o / T
    o, q on one processor or link   x_q >= x_o + d_o / T - (1 - y),  x_o >= x_q + d_q / T - y
    stage k at the start of an F    n_k = h_Bk - h_Fk + [F_k has started in this period] - [B_k has ended in it]
    at every F of a processor       sum over its stages of (fixed + n_k saved) <= memory

y says that o comes first in the period; an operation may go on into the next period, which the second condition of a
pair covers. Divided by T everything is linear in 1/T, which is what is maximised: one mixed integer program, solved by
HiGHS through scipy (`pip install 'lightning-pipe[planners]'`). Both directions of a link take turns and half of its
seconds each. Exponential in the operations of a processor at worst: for some ten stages.

Legend: o, q operations, d seconds, T period, k stage, x, h, y as above, n micro-batches that a stage holds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_pipe.errors import ConfigError
from lightning_pipe.planner.systems.madpipe.madpipe_chain import Chain
from lightning_pipe.planner.systems.madpipe.madpipe_special import Allocation

Kind = Literal["F", "B", "ahead", "back"]


@dataclass(frozen=True)
class PeriodicOperation:
    """What is done to every micro-batch once.

    Attributes:
        kind: a compute of the stage, or the message from it (`ahead`) or to it (`back`) over the link to the next.
        stage: the stage.
        seconds: what it takes.
        where: processor, or pair of processors, that does one thing at a time.
    """

    kind: Kind
    stage: int
    seconds: float
    where: Hashable


@dataclass(frozen=True)
class Periodic:
    """A schedule that repeats.

    Attributes:
        period: seconds per micro-batch.
        operations: in the order in which a micro-batch meets them.
        starts: seconds into the period at which each starts.
        shifts: how many periods later each meets the same micro-batch than the first one does.
    """

    period: float
    operations: tuple[PeriodicOperation, ...]
    starts: tuple[float, ...]
    shifts: tuple[int, ...]


def least_periodic(chain: Chain, allocation: Allocation) -> Periodic | None:
    """Return a schedule with the least period for an allocation; None if memory allows none.

    Args:
        chain: equal processors; what is dropped is left out.
        allocation: stages and who runs them.

    Raises:
        ConfigError: if scipy is not installed.
    """
    return _Model(chain, allocation).solved()


def operations_of(chain: Chain, allocation: Allocation) -> tuple[PeriodicOperation, ...]:
    """Return what is done to a micro-batch, in order: forward along the stages and back."""
    bounds = [*itertools.pairwise((0, *allocation.cuts, chain.bounds - 1))]
    forward, backward = [], []
    for s, (a, b) in enumerate(bounds):
        processor, owner = chain.processors[0], allocation.processors[s]
        forward_s = float(processor.forward_s[a, b])
        forward.append(PeriodicOperation("F", s, forward_s, owner))
        backward.append(PeriodicOperation("B", s, float(processor.load_s[a, b]) - forward_s, owner))
        if s + 1 < len(bounds) and owner != allocation.processors[s + 1]:
            link = frozenset((owner, allocation.processors[s + 1]))
            half = float(chain.links[0][b]) / 2
            forward.append(PeriodicOperation("ahead", s, half, link))
            backward.append(PeriodicOperation("back", s, half, link))
    return (*forward, *_backward(backward))


def _backward(operations: Sequence[PeriodicOperation]) -> Iterator[PeriodicOperation]:
    """Yield operations from the last stage to the first, a message to a stage before the stage's compute."""
    yield from sorted(operations, key=lambda o: (-o.stage, o.kind == "B"))


class _Model:
    """The integer program: columns x, then h, then y, then 1/T (in units of the largest load)."""

    def __init__(self, chain: Chain, allocation: Allocation) -> None:
        self._chain, self._allocation = chain, allocation
        self._operations = operations_of(chain, allocation)
        count = len(self._operations)
        loads: dict[Hashable, float] = defaultdict(float)
        for operation in self._operations:
            loads[operation.where] += operation.seconds
        self._unit = max(loads.values())
        pairs = itertools.combinations(range(count), 2)
        shared = [(o, q) for o, q in pairs if self._operations[o].where == self._operations[q].where]
        self._order = {pair: 2 * count + i for i, pair in enumerate(shared)}
        self._rate = 2 * count + len(shared)
        self._rows: list[dict[int, float]] = []
        self._least: list[float] = []
        self._state_precedence()
        self._state_turns()
        self._state_memory()

    def _add(self, row: dict[int, float], least: float) -> None:
        self._rows.append(row)
        self._least.append(least)

    def _seconds(self, o: int) -> float:
        return self._operations[o].seconds / self._unit

    def _state_precedence(self) -> None:
        count = len(self._operations)
        for o, q in itertools.pairwise(range(count)):
            self._add({q: 1, count + q: 1, o: -1, count + o: -1, self._rate: -self._seconds(o)}, 0.0)

    def _state_turns(self) -> None:
        for (o, q), y in self._order.items():
            self._add({q: 1, o: -1, self._rate: -self._seconds(o), y: -1}, -1.0)
            self._add({o: 1, q: -1, self._rate: -self._seconds(q), y: 1}, 0.0)

    def _state_memory(self) -> None:
        at: dict[tuple[Kind, int], int] = {(o.kind, o.stage): i for i, o in enumerate(self._operations)}
        processor, owners = self._chain.processors[0], self._allocation.processors
        bounds = [*itertools.pairwise((0, *self._allocation.cuts, self._chain.bounds - 1))]
        count, memory = len(self._operations), processor.memory_bytes
        for s, owner in enumerate(owners):
            row: dict[int, float] = defaultdict(float)
            room = memory
            for k in (k for k, other in enumerate(owners) if other == owner):
                saved = float(processor.saved_bytes[bounds[k]])
                room -= float(processor.fixed_bytes[bounds[k]])
                row[count + at["B", k]] -= saved / memory
                row[count + at["F", k]] += saved / memory
                room -= self._add_first(row, at["F", k], at["F", s], -saved / memory) * memory
                room -= self._add_first(row, at["B", k], at["F", s], saved / memory) * memory
            self._add(dict(row), -room / memory)

    def _add_first(self, row: dict[int, float], o: int, q: int, weight: float) -> float:
        """Add `weight` times [o has begun (F) or ended (B) when q starts] to a row; return what is constant of it."""
        if o == q:
            return -weight
        y = self._order[min(o, q), max(o, q)]
        if o < q:
            row[y] += weight
            return 0.0
        row[y] -= weight
        return -weight

    def solved(self) -> Periodic | None:
        """Return the best schedule."""
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
        except ImportError:
            raise ConfigError(
                "A periodic schedule was asked for, but scipy is not installed. Run "
                "pip install 'lightning-pipe[planners]'."
            ) from None
        count, columns = len(self._operations), self._rate + 1
        matrix = np.zeros((len(self._rows), columns))
        for i, row in enumerate(self._rows):
            matrix[i, list(row)] = list(row.values())
        upper = np.ones(columns)
        upper[count : 2 * count] = count
        upper[[0, count]] = 0.0  # time begins with the first forward
        integral = np.zeros(columns)
        integral[count : self._rate] = 1
        target = np.zeros(columns)
        target[self._rate] = -1.0
        found = milp(
            target,
            constraints=LinearConstraint(matrix, lb=np.array(self._least)),
            integrality=integral,
            bounds=Bounds(np.zeros(columns), upper),
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None or found.x[self._rate] <= 0:
            return None
        period = self._unit / float(found.x[self._rate])
        starts = tuple(float(x) * period for x in found.x[:count])
        return Periodic(period, self._operations, starts, tuple(round(float(h)) for h in found.x[count : 2 * count]))
