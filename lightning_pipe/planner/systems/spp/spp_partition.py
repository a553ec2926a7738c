"""Partition of SPP (PRM): stages on a row of devices whose slowest stage or link is as fast as possible.

Partition, replication and mapping (PRM) after Luo et al., SPP (INFOCOM 2022), reconstructed, and walked from the last
stage to the first, so that the stages behind a stage, and with them its micro-batches in flight, are known (after
Piper, Tarnawski et al., NeurIPS 2021):

    W[x, i, r, a] = min over b, r' of max( stage[i, r, x][a, b],
                                           link[i, r, r'][b],
                                           W[x - 1, i + r, r', b] )

are the least seconds of the slowest stage or link if everything from bound a on runs in x stages on the units from i
on, of which the first stage takes r. O(x V R (N^2 + R N)) for V units, R numbers of units that a stage may take, and N
bounds.

Legend: x stages, i units, r, r' numbers of units, a, b bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class StageCosts(Protocol):
    """What stages and links of a row of units cost; `degrees` are the numbers of units that a stage may take."""

    def stages(self, first: int, degrees: Sequence[int], behind: int) -> NDArray[np.float64]:
        """Return [r, a, b]: seconds of stages that begin with unit `first` and have `behind` stages behind them."""
        ...

    def links(self, first: int, degree: int, degrees: Sequence[int]) -> NDArray[np.float64]:
        """Return [r', b]: seconds of what crosses every bound from a block to the next `degrees` units."""
        ...


@dataclass(frozen=True)
class Partition:
    """Stages on neighbouring units.

    Attributes:
        worst: cost of the worst stage or link.
        bounds: bounds at which stages 1, 2, ... begin.
        degrees: units of each stage.
    """

    worst: float
    bounds: tuple[int, ...]
    degrees: tuple[int, ...]


def partitions(costs: StageCosts, *, units: int, degrees: Sequence[int], last: int) -> Iterator[Partition | None]:
    """Yield the best partition into 1, 2, ... stages; None where there is none.

    Args:
        costs: of stages and links.
        units: units of the row; all are used.
        degrees: numbers of units that a stage may take, rising.
        last: the last bound.
    """
    table = _Table(costs, units, degrees, last)
    for _ in range(min(units, last)):
        table.add_stage()
        yield table.best()


class _Table:
    """W for all numbers of stages so far: for every first unit i an array over [r, a]."""

    def __init__(self, costs: StageCosts, units: int, degrees: Sequence[int], last: int) -> None:
        self._costs, self._units, self._last = costs, units, last
        # of every first unit: those for which there are units
        self._degrees = [tuple(degree for degree in degrees if i + degree <= units) for i in range(units + 1)]
        self._levels: list[list[NDArray[np.float64]]] = []

    def add_stage(self) -> None:
        """Add one more stage before those that there are."""
        x = len(self._levels)
        firsts = range(self._units)
        self._levels.append([self._behind_nothing(i) if x == 0 else self._before(i, x) for i in firsts])

    def _behind_nothing(self, first: int) -> NDArray[np.float64]:
        degrees = self._degrees[first]
        found = np.full((len(degrees), self._last + 1), np.inf)
        if self._units - first in degrees:
            whole = self._units - first
            found[degrees.index(whole)] = self._costs.stages(first, (whole,), 0)[0, :, self._last]
        return found

    def _before(self, first: int, x: int) -> NDArray[np.float64]:
        if not self._degrees[first]:
            return np.full((0, self._last + 1), np.inf)
        stages = self._costs.stages(first, self._degrees[first], x)
        rest = np.stack([self._rest(first, degree, x).min(axis=0) for degree in self._degrees[first]])
        worst: NDArray[np.float64] = np.maximum(stages, rest[:, None, :]).min(axis=2)
        return worst

    def _rest(self, first: int, degree: int, x: int) -> NDArray[np.float64]:
        """Return [r', b]: the worst of the link behind a block and of what is behind the link, in x stages."""
        then = first + degree
        following = self._degrees[then]
        if not following:
            return np.full((1, self._last + 1), np.inf)
        found: NDArray[np.float64] = np.maximum(self._levels[x - 1][then], self._costs.links(first, degree, following))
        return found

    def best(self) -> Partition | None:
        """Return the best partition with as many stages as there are."""
        x = len(self._levels) - 1
        worst = float(self._levels[x][0][:, 0].min(initial=np.inf))
        if worst == np.inf:
            return None
        bounds: list[int] = []
        degrees: list[int] = []
        first, a, r = 0, 0, int(self._levels[x][0][:, 0].argmin())
        while True:
            degree = self._degrees[first][r]
            degrees.append(degree)
            if x == 0:
                return Partition(worst, tuple(bounds), tuple(degrees))
            rest = self._rest(first, degree, x)
            stage = self._costs.stages(first, (degree,), x)[0, a]
            b = int(np.maximum(stage, rest.min(axis=0)).argmin())
            bounds.append(b)
            first, a, r, x = first + degree, b, int(rest[:, b].argmin()), x - 1


def recut(
    stages: Sequence[NDArray[np.float64]],
    links: Sequence[NDArray[np.float64]],
    windows: Sequence[NDArray[np.int64]],
) -> Partition | None:
    """Return the best bounds of stages whose units are given; None if there are none. `degrees` are left empty.

    Args:
        stages: [a, b] of every stage.
        links: [b] between every stage and the next.
        windows: bounds at which stages 1, 2, ... may begin.
    """
    ends = [np.array([0]), *windows, np.array([stages[0].shape[0] - 1])]
    best, choices = np.zeros(1), []
    for s, stage in enumerate(stages):
        here = np.maximum(best, links[s - 1][ends[s]]) if s else best
        worst = np.maximum(here[:, None], stage[np.ix_(ends[s], ends[s + 1])])
        choices.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    if best[0] == np.inf:
        return None
    bounds, chosen = [], 0
    for s in range(len(stages) - 1, 0, -1):
        chosen = int(choices[s][chosen])
        bounds.append(int(ends[s][chosen]))
    return Partition(float(best[0]), tuple(reversed(bounds)), ())
