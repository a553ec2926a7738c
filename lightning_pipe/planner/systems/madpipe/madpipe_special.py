"""Special processor of MadPipe: dynamic program for allocations where one processor holds several stages.

After MadPipe (`madpipe_chain`): one processor is special, all others hold one stage each. From the end of the
chain, with p normal processors left, load t and memory m on the special one already, and V as in
`planner.systems.madpipe.madpipe_contiguous`, a stage [a, b) of the g-th group goes

    to a normal processor      if bytes(a, b, g) <= memory                     p - 1
    to the special processor   if m + bytes(a, b, g - 1) <= memory, t + U <= T  t + U, m + bytes(a, b, g - 1)

g - 1 is deliberately optimistic: what exactly the special processor holds depends on the order of its computes, which
`madpipe_periodic` decides; an allocation is a proposal until it has said within which period it can run.

Two things are simpler than in the paper. Every period is asked for feasibility, and the least feasible one is found by
bisection. And because everything grows with V, the least V is kept of every state (b, p, t, m), so V is no dimension
and is exact. t and m are rounded up to steps of the period and of the memory, so they are never underestimated.
O(bounds^2 processors steps^2) for one period.

Legend: a, b bounds, p normal processors left, t and m in steps, g group; V is kept as (group, seconds filled of it).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.errors import PlanError
from lightning_pipe.planner.systems.madpipe.madpipe_chain import Chain
from lightning_pipe.planner.systems.madpipe.madpipe_contiguous import least_period, longest_period
from lightning_pipe.schedule.orders.one_f_one_b import ROUNDING

SPECIAL = 0  # number of the special processor; normal ones are 1, 2, ... in the order of the chain
_NOBODY = -1


@dataclass(frozen=True)
class Allocation:
    """Stages and who runs them.

    Attributes:
        cuts: bounds at which stages 1, 2, ... begin.
        processors: processor of every stage.
        period: seconds per micro-batch for which it was made.
    """

    cuts: tuple[int, ...]
    processors: tuple[int, ...]
    period: float


def best_allocation(chain: Chain, *, steps: int = 20, precision: float = 1e-3) -> Allocation | None:
    """Return the allocation with the least period on equal processors, one of them special; None if memory allows none.

    Args:
        chain: equal processors with equal links.
        steps: into which the load and the memory of the special processor are divided.
        precision: relative error of the period.

    Raises:
        PlanError: if processors or links differ.
    """
    first = chain.processors[0]
    if any(p is not first for p in chain.processors) or any(link is not chain.links[0] for link in chain.links):
        raise PlanError("A special processor was asked for among different ones; expected equal processors and links.")
    least = float(first.load_s[0, -1]) / len(chain.processors)
    return least_period(
        lambda period: _Search(chain, period, steps).allocation(),
        least=least,
        most=longest_period(chain),
        precision=precision,
    )


class _Search:
    """The dynamic program for one period; arrays over (b, p, t, m)."""

    def __init__(self, chain: Chain, period: float, steps: int) -> None:
        self._chain, self._period, self._steps = chain, period, steps
        self._limit = period * (1 + ROUNDING)
        normal = len(chain.processors)
        shape = (chain.bounds, normal, steps + 1, steps + 1)
        self._group = np.ones(shape, dtype=int)
        self._filled = np.full(shape, np.inf)
        self._before = np.full(shape, _NOBODY)
        self._index = np.arange(self._before.size).reshape(shape)
        self._filled[-1, normal - 1, 0, 0] = 0.0

    def allocation(self) -> Allocation | None:
        """Return an allocation that the period suffices for."""
        load = self._chain.processors[0].load_s
        for b in reversed(range(1, self._chain.bounds)):
            if not np.isfinite(self._filled[b]).any():
                continue
            for a in reversed(range(b)):
                if load[a, b] > self._limit:
                    break
                self._extend(a, b)
        found = self._filled[0]
        if not np.isfinite(found).any():
            return None
        return self._traced(int(self._index[0].ravel()[np.argmin(self._value(self._group[0], found))]))

    def _value(self, group: NDArray[np.int64], filled: NDArray[np.float64]) -> NDArray[np.float64]:
        value: NDArray[np.float64] = (group - 1) * self._period + filled
        return value

    def _extend(self, a: int, b: int) -> None:
        """Put stage [a, b) in front of all states at b."""
        processor = self._chain.processors[0]
        group, filled = self._packed(self._group[b], self._filled[b], float(processor.load_s[a, b]))
        held = np.minimum(group, self._chain.microbatches)
        link = float(self._chain.links[0][a]) if a and self._chain.links else 0.0
        ahead = self._packed(group, filled, link) if a else (group, filled)
        if link > self._limit:
            return
        load = math.ceil(float(processor.load_s[a, b]) / self._period * self._steps - ROUNDING)
        for g in np.unique(held[np.isfinite(filled)]).tolist():
            here = (held == g) & np.isfinite(filled)
            if processor.bytes(a, b, held=g) <= processor.memory_bytes:
                self._keep(a, b, here, ahead, shift=(1, 0, 0))
            share = processor.bytes(a, b, held=g - 1) / processor.memory_bytes
            if load <= self._steps and share <= 1.0:
                self._keep(a, b, here, ahead, shift=(0, load, math.ceil(share * self._steps - ROUNDING)))

    def _packed(
        self, group: NDArray[np.int64], filled: NDArray[np.float64], load: float
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        stays = filled + load <= self._limit
        alone = np.where(np.isfinite(filled), load, np.inf)
        return np.where(stays, group, group + 1), np.where(stays, filled + load, alone)

    def _keep(
        self,
        a: int,
        b: int,
        here: NDArray[np.bool_],
        ahead: tuple[NDArray[np.int64], NDArray[np.float64]],
        *,
        shift: tuple[int, int, int],
    ) -> None:
        """Keep at a what comes from these states at b, where it is better than what is known.

        Args:
            a, b: the stage.
            here: states at b.
            ahead: V in front of the stage, for all states at b.
            shift: normal processors, steps of load and steps of memory that the stage takes.
        """
        processors, load, memory = shift
        size = self._steps + 1
        source = (slice(processors, None), slice(0, size - load), slice(0, size - memory))
        target = (a, slice(0, here.shape[0] - processors), slice(load, None), slice(memory, None))
        group, filled = ahead[0][source], np.where(here[source], ahead[1][source], np.inf)
        better = self._value(group, filled) < self._value(self._group[target], self._filled[target])
        self._group[target] = np.where(better, group, self._group[target])
        self._filled[target] = np.where(better, filled, self._filled[target])
        self._before[target] = np.where(better, self._index[b][source], self._before[target])

    def _traced(self, state: int) -> Allocation:
        """Return the allocation that led to a state at the start of the chain."""
        places = []
        while state != _NOBODY:
            place = np.unravel_index(state, self._before.shape)
            places.append((int(place[0]), int(place[1])))
            state = int(self._before.ravel()[state])
        owners, normal = [], 0
        for (_, p), (_, q) in itertools.pairwise(places):
            normal += q - p
            owners.append(normal if q > p else SPECIAL)
        return Allocation(tuple(b for b, _ in places[1:-1]), tuple(owners), self._period)
