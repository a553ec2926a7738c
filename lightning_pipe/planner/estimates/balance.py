"""Balanced partition: where stages begin so that the slowest is fastest, by dynamic programming.

    W[s, b] = min over a < b of max(W[s-1, a], cost[s, a, b])

(PipeDream, SOSP'19 section 3.1, without its choice of replicas, which are given here.) Cost of a stage: seconds of F
and B on its slowest replica, plus a multiple of the seconds of the messages at its ends: hidden behind computes they
cost nothing, on a busy link more than once. Stages that memory forbids cost infinitely much. O(stages x bounds^2).

Legend: s stage, a, b bounds as in `planner.estimates.stage_costs`, n samples.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.planner.estimates.recurrence import Estimator
from lightning_pipe.planner.estimates.stage_costs import Matrix

TRAFFIC_PRICES = (0.0, 1.0, 3.0)  # messages hidden behind computes, exposed, and exposed on a busy link
_MOST_MATRICES = 64  # kept for other calls


class Balancer:
    """Balance stages of one problem over the positions of an estimator.

    Args:
        estimator: costs.
    """

    def __init__(self, estimator: Estimator) -> None:
        self._estimator, self._segments = estimator, estimator.segments
        self._made: OrderedDict[tuple[object, ...], Matrix] = OrderedDict()

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
        nothing = np.zeros(self._segments.units + 1)
        between = (traffic * self._message_s(here, there, samples) for here, there in itertools.pairwise(ranks))
        messages = [nothing, *(between if traffic else [nothing] * (len(ranks) - 1)), nothing]
        for s, group in enumerate(ranks):
            held = None if deep is None else min(microbatches, len(ranks) - s) if deep else 1
            stage = self._stage_s(group, samples, held=held)
            yield stage + (messages[s][:, None] + messages[s + 1]) if traffic else stage

    def _message_s(self, here: tuple[int, ...], there: tuple[int, ...], samples: float) -> NDArray[np.float64]:
        """Return the seconds, there and back, of what crosses at every bound: affine in the bytes, so two suffice."""
        none = sum(self._estimator.exchange_s(*pair, 0.0) for pair in ((here, there), (there, here)))
        unit = 1e6  # bytes, far above what latency hides
        per_byte = (sum(self._estimator.exchange_s(*p, unit) for p in ((here, there), (there, here))) - none) / unit / 2
        crossing = sum(found.bytes(samples) for found in self._segments.crossing.values())
        return np.asarray(none + per_byte * crossing)

    def _stage_s(self, group: tuple[int, ...], samples: float, *, held: int | None) -> Matrix:
        """Return the seconds of F and B on the slowest replica; infinite where so many micro-batches do not fit.

        What may be recomputed or offloaded needs no room, unless all stages have room for it anyway.
        """
        slices = self._estimator.slices(0, self._segments.units, group, samples)
        cluster = self._estimator.problem.cluster
        pairs = frozenset((n, cluster.device(rank).speed) for n, rank in slices)
        room = min(cluster.device(rank).memory_bytes for rank in group)
        n = max(share for share, _ in slices)
        load = self._once(("load", pairs), lambda: self._load_s(pairs))
        if held is None:
            return load
        kept = self._once(("kept", n, room), lambda: self._kept(n, room))
        if kept[0, -1] < held and self._estimator.problem.constraints.memory_policies:
            held = 0
        return self._once(("stage", pairs, n, room, held), lambda: np.where(kept >= held, load, np.inf))

    def _load_s(self, pairs: Iterable[tuple[float, float]]) -> Matrix:
        """Return the seconds of the slowest of (samples, speed), infinite where there is no stage."""
        slowest: Matrix = np.maximum.reduce([self._both_s(n) / speed for n, speed in pairs])
        slowest[np.tril_indices_from(slowest)] = np.inf
        return slowest

    def _both_s(self, n: float) -> Matrix:
        return self._segments.forward_s.all(n) + self._segments.backward_s.all(n)

    def _kept(self, n: float, room: int) -> Matrix:
        """Return how many micro-batches every stage can have in flight; less than none if it does not fit itself."""
        left, saved = room - self._segments.state_bytes, self._segments.saved_bytes.all(n)
        kept = np.divide(left, saved, out=np.full_like(left, np.inf), where=saved > 0)
        return np.where(left >= 0, kept, -1.0)

    def _once(self, key: tuple[object, ...], make: Callable[[], Matrix]) -> Matrix:
        if key not in self._made:
            self._made[key] = make()
            if len(self._made) > _MOST_MATRICES:
                self._made.popitem(last=False)
        return self._made[key]


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
        best = np.take_along_axis(largest, choices[-1][None, :], axis=0)[0]
    if best[-1] == np.inf:
        return None
    found, b = [], len(best) - 1
    for choice in reversed(choices):
        b = int(choice[b])
        found.append(b)
    return tuple(reversed(found))
