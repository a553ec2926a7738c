"""Where do given stages begin so that the slowest of them is quickest? The partition problem, by dynamic programming.

    W[s, b] = min over a < b of max(W[s-1, a], cost[s, a, b])

(PipeDream, SOSP'19 section 3.1, without its choice of replicas, which are given here.) Cost of a stage: seconds of F
and B on its slowest replica, plus a multiple of the seconds of the messages at its ends: hidden behind computes they
cost nothing, on a busy link more than once. Stages that memory forbids cost infinitely much. O(stages x bounds^2).

Legend: s stage, a, b bounds as in `planner.segments`, n samples.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.planner.estimate import Estimator
from lightning_pipe.planner.segments import Matrix

TRAFFIC_PRICES = (0.0, 1.0, 3.0)  # messages hidden behind computes, exposed, and exposed on a busy link
_MOST_MATRICES = 64  # kept for other calls


class Balancer:
    """Balance stages of one problem over the positions of an estimator.

    Args:
        estimator: costs.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator, self._segments = estimator, estimator.segments
        self._loads: OrderedDict[float, Matrix] = OrderedDict()
        size = self._segments.units + 1
        self._rising = np.triu(np.ones((size, size), dtype=bool), k=1)

    def cuts(
        self, ranks: Sequence[tuple[int, ...]], microbatches: int, *, traffic: float = 0.0, deep: bool | None = True
    ) -> tuple[int, ...] | None:
        """Return the graph positions at which stages 1, 2, ... begin; None if memory allows none.

        Args:
            ranks: ranks of each stage.
            microbatches: micro-batches per batch.
            traffic: price of messages.
            deep: whether stages hold as many micro-batches as 1F1B's "pa" needs, or one; None: ignore memory.
        """
        found = least_largest(self._costs(ranks, microbatches, traffic=traffic, deep=deep))
        return None if found is None else tuple(int(self._segments.bounds[b]) for b in found)

    def variants(self, ranks: Sequence[tuple[int, ...]], microbatches: int) -> Iterator[tuple[int, ...]]:
        """Yield the different cuts for all prices of messages; for as much warm-up as there is memory for."""
        if len(ranks) > self._segments.units:
            return
        for deep in (True, False, None):
            found = [
                cuts
                for traffic in (TRAFFIC_PRICES if len(ranks) > 1 else (0.0,))
                if (cuts := self.cuts(ranks, microbatches, traffic=traffic, deep=deep)) is not None
            ]
            yield from dict.fromkeys(found)
            if found:
                return

    def _costs(
        self, ranks: Sequence[tuple[int, ...]], microbatches: int, *, traffic: float, deep: bool | None
    ) -> Iterator[Matrix]:
        """Yield the cost of every stage, for all pairs of bounds."""
        samples = self._estimator.problem.samples / microbatches
        messages = [np.zeros(self._segments.units + 1)]
        for here, there in itertools.pairwise(ranks):
            messages.append(traffic * self._message_s(here, there, samples))
        messages.append(np.zeros(self._segments.units + 1))
        for s, group in enumerate(ranks):
            held = min(microbatches, len(ranks) - s) if deep else 1
            cost = self._load_s(group, samples) + messages[s][:, None] + messages[s + 1][None, :]
            allowed = self._rising if deep is None else self._rising & self._fits(group, samples, held=held)
            yield np.where(allowed, cost, np.inf)

    def _message_s(self, here: tuple[int, ...], there: tuple[int, ...], samples: float) -> NDArray[np.float64]:
        """Return the seconds, there and back, of what crosses at every bound: affine in the bytes, so two suffice."""
        none = sum(self._estimator.exchange_s(*pair, 0.0) for pair in ((here, there), (there, here)))
        unit = 1e6  # bytes, far above what latency hides
        per_byte = (sum(self._estimator.exchange_s(*p, unit) for p in ((here, there), (there, here))) - none) / unit / 2
        crossing = sum(found.bytes(samples) for found in self._segments.crossing.values())
        return np.asarray(none + per_byte * crossing)

    def _load_s(self, group: tuple[int, ...], samples: float) -> Matrix:
        """Return the seconds of F and B on the slowest replica, for all pairs of bounds."""
        slices = self._estimator.slices(0, self._segments.units, group, samples)
        cluster = self._estimator.problem.cluster
        pairs = {(n, cluster.device(rank).speed) for n, rank in slices}
        slowest: Matrix = np.maximum.reduce([self._both_s(n) / speed for n, speed in pairs])
        return slowest

    def _both_s(self, samples: float) -> Matrix:
        if samples not in self._loads:
            self._loads[samples] = self._segments.forward_s.all(samples) + self._segments.backward_s.all(samples)
            if len(self._loads) > _MOST_MATRICES:
                self._loads.popitem(last=False)
        return self._loads[samples]

    def _fits(self, group: tuple[int, ...], samples: float, *, held: int) -> NDArray[np.bool_]:
        """Say which stages fit into the smallest memory of a group while `held` micro-batches are in flight."""
        n = max(share for share, _ in self._estimator.slices(0, self._segments.units, group, samples))
        room = min(self._estimator.problem.cluster.device(rank).memory_bytes for rank in group)
        if self._segments.peak_bytes(n, held)[0, -1] <= room:
            return self._rising
        if self._estimator.problem.wishes.reliefs:
            held = 0
        return np.asarray(self._segments.peak_bytes(n, held) <= room)


def least_largest(costs: Iterable[Matrix]) -> tuple[int, ...] | None:
    """Return the bounds at which stages 1, 2, ... begin so that the largest cost is least; None if all are infinite.

    Args:
        costs: of every stage in order, for all pairs of bounds; infinite where it cannot be.
    """
    stages = iter(costs)
    best = next(stages)[0]
    choices = []
    for cost in stages:
        largest = np.maximum(best[:, None], cost)
        choices.append(largest.argmin(axis=0))
        best = largest.min(axis=0)
    if best[-1] == np.inf:
        return None
    found, b = [], len(best) - 1
    for choice in reversed(choices):
        b = int(choice[b])
        found.append(b)
    return tuple(reversed(found))
