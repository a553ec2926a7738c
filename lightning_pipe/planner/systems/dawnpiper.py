"""DawnPiper planner: halves the pipeline between the balance of time and the balance of memory.

After Peng et al., DawnPiper (arXiv 2505.05856, 2025), of which abstract and openings were read, and Capuchin (ASPLOS
2020) of the same first author; the rest is reconstructed.

    interval   two neighbouring stages share nodes at cut x. T1 and M1, time and memory of the first, rise with x; T2
               and M2 fall. Let x_c balance times, x_m memories, and let squeezing a stage under its memory take the
               same never falling time of its overflow everywhere. Then the least max(T1 + phi(M1), T2 + phi(M2)) lies
               between x_c and x_m: left of both the second stage is the slower and the fuller one, and shrinks to the
               right; and so on the other side.
    halving    n stages are the first n // 2 and the others, cut somewhere between the positions of equal mean time and
               equal mean memory; each part is halved likewise. Parts are remembered, and left when they are slower
               than the best found.
    squeeze    saved bytes as a fluid: what a copy to the host carries during the stage's own work on a micro-batch is
               free, and gone for all but the micro-batches on their way; the share that is still too much is recomputed
               for that share of F; what arrived for the stage stays, and once what the largest node saves. Which
               tensors these are is decided for the judged plan, see `planner.memory.fit_memory`.

Where seconds per byte differ between stages the theorem fails, so the interval is widened to a few positions more, of
which those with the least mean time after squeezing are tried; up to `_TRIED` for few stages, which is all of them in
small graphs, and fewer for many stages. Positions are those that few bytes cross.

Ours: the synchronous schedule (K = stages behind, one version of the weights); groups of r equal replicas, neighbours
in rank order, as one device each, for every r that divides the devices; several numbers of micro-batches. Between
these the estimate of the whole batch decides, between cuts the largest time of a stage, as in the paper. Where nothing
fits however it is squeezed, fewer micro-batches are held.

Growth: O(groups . counts . tried partitions), each of O(positions) by numpy; `replica_groups` bounds the stages.

Legend: a, b bounds as in `planner.estimates.stage_costs`; x cut; s stage; K micro-batches in flight.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.cluster import NO_SWAP
from lightning_pipe.planner.candidates.candidate import Candidate, share_alike
from lightning_pipe.planner.candidates.cut_points import cuttable, worthwhile
from lightning_pipe.planner.candidates.moves import Ranks
from lightning_pipe.planner.candidates.replica_groups import equal_groups
from lightning_pipe.planner.estimates.recurrence import Estimator, microbatch_counts
from lightning_pipe.planner.estimates.stage_costs import Matrix, StageCostTable
from lightning_pipe.planner.problem import Problem
from lightning_pipe.schedule.lower.offload import AHEAD

Bounds: TypeAlias = NDArray[np.int64]
Seconds: TypeAlias = NDArray[np.float64]

_MOST_OUTLINES = 8
_POSITIONS = 200
_TRIED = ((8, 9), (16, 5), (32, 3), (64, 2))  # cuts tried for up to so many stages; one for more
_PARTITIONED = ((16, 6), (64, 3))  # numbers of micro-batches for which up to so many stages are cut; one for more
_WIDER = 2  # positions by which the interval is widened on both sides
_PER_BYTE = 1e6  # seconds charged for a byte that does not fit whatever is squeezed: more than all else


def dawnpiper(problem: Problem) -> list[Candidate]:
    """Return the best outlines after DawnPiper, the best first.

    Args:
        problem: what is planned.
    """
    estimators: dict[bool, Estimator] = {}
    found: dict[Candidate, tuple[float, float]] = {}
    for groups in equal_groups(problem, len(cuttable(problem.graph, sliced=False)) + 1):
        sliced = not share_alike(problem, groups)
        if sliced not in estimators:
            estimators[sliced] = Estimator(StageCostTable(problem, worthwhile(problem, sliced=sliced, most=_POSITIONS)))
        estimator = estimators[sliced]
        if estimator.segments.units < len(groups):
            continue
        counts = microbatch_counts(problem, stages=len(groups), replicas=len(groups[0]))
        few = next((count for stages, count in _PARTITIONED if len(groups) <= stages), 1)
        partitions = dict.fromkeys(partition(estimator, groups, count) for count in counts[-few:])
        for (cuts, most), count in itertools.product(partitions, counts):
            outline, seconds, excess = estimator.outline(cuts, groups, count)
            found[outline] = (max(0.0, excess), seconds)
            if most < len(groups) and problem.constraints.memory_policies:
                capped = replace(outline, depths=tuple(min(depth, most) for depth in outline.depths))
                found[capped] = (max(0.0, excess), max(seconds, estimator.step_s(capped)))
    return sorted(found, key=lambda outline: found[outline])[:_MOST_OUTLINES]


def partition(estimator: Estimator, groups: Ranks, microbatches: int) -> tuple[tuple[int, ...], int]:
    """Return where the stages of given groups begin, by halving, and with how many micro-batches in flight at most.

    These are halved while no partition fits even when all that can be is squeezed.

    Args:
        estimator: costs.
        groups: ranks of each stage.
        microbatches: micro-batches per batch.
    """
    most = len(groups)
    model = StageTimes(estimator, groups, microbatches)
    while True:
        slowest, cuts = _Halving(model).best(0, estimator.segments.units, 0, len(groups), math.inf)
        if slowest < _PER_BYTE or most == 1:
            positions = tuple(int(estimator.segments.bounds[cut]) for cut in cuts)
            return positions, most
        most //= 2
        model.limit(most)


@dataclass(frozen=True)
class _Kind:
    """Costs of all stages on one kind of group.

    Attributes:
        load: seconds of F and B on the slowest replica.
        forward: seconds of F.
        saved: bytes saved per micro-batch on the fullest replica.
        remade: the most of it that one unit saves, which is there while it is recomputed.
        own: bytes beside them.
        memory: bytes of the smallest device.
        carried: bytes that a copy to the host carries per second.
    """

    load: Matrix
    forward: Matrix
    saved: Matrix
    remade: Matrix
    own: Matrix
    memory: float
    carried: float


class StageTimes:
    """Seconds per micro-batch of any stage of a pipeline, squeezed under its memory.

    Args:
        estimator: costs.
        groups: ranks of each stage.
        microbatches: micro-batches per batch.
    """

    def __init__(self, estimator: Estimator, groups: Ranks, microbatches: int) -> None:
        self._estimator, self._microbatches = estimator, microbatches
        self._memory_policies = estimator.problem.constraints.memory_policies
        samples = estimator.problem.samples / microbatches
        self._arriving = estimator.segments.crossing["F"].bytes(samples / max(map(len, groups)))
        kinds: dict[tuple[object, ...], _Kind] = {}
        self._kinds: list[_Kind] = []
        self.held = [min(microbatches, len(groups) - s) for s in range(len(groups))]
        for group in groups:
            key = self._key(group, samples)
            if key not in kinds:
                kinds[key] = self._kind(group, samples)
            self._kinds.append(kinds[key])

    def limit(self, most: int) -> None:
        """Let no stage hold more micro-batches than these."""
        self.held = [min(held, most) for held in self.held]

    def _key(self, group: tuple[int, ...], samples: float) -> tuple[object, ...]:
        cluster = self._estimator.problem.cluster
        slices = self._estimator.slices(0, self._estimator.segments.units, group, samples)
        return tuple((n, cluster.device(r), cluster.hosts[cluster.host_of(r)].swap) for n, r in slices)

    def _kind(self, group: tuple[int, ...], samples: float) -> _Kind:
        segments, cluster = self._estimator.segments, self._estimator.problem.cluster
        slices = self._estimator.slices(0, segments.units, group, samples)
        shares = {(n, cluster.device(rank).speed) for n, rank in slices}
        forward = np.maximum.reduce([segments.forward_s.all(n) / speed for n, speed in shares])
        backward = np.maximum.reduce([segments.backward_s.all(n) / speed for n, speed in shares])
        most = max(n for n, _ in shares)
        crossing = np.maximum.reduce([found.bytes(most) for found in segments.crossing.values()])
        own = segments.state_bytes + np.maximum(crossing[:, None], crossing[None, :])
        if self._microbatches > 1 or len(group) > 1:
            own = own + segments.trained_bytes  # gradients of one micro-batch, or their sum, beside those of all
        work = np.array([segments.workspace_bytes(u, u + 1, most) for u in range(segments.units)])
        saved = segments.saved_bytes.all(most)
        swaps = [cluster.hosts[cluster.host_of(rank)].swap for rank in group]
        return _Kind(
            load=forward + backward,
            forward=forward,
            saved=saved,
            remade=_largest(np.diagonal(saved, offset=1)),
            own=own + _largest(work),
            memory=float(min(cluster.device(rank).memory_bytes for rank in group)),
            carried=min(0.0 if swap == NO_SWAP else swap.bytes_per_s for swap in swaps),
        )

    def seconds(self, stage: int, a: Bounds | int, b: Bounds | int) -> Seconds:
        """Return the seconds of a stage on the nodes from bound a to bound b, for arrays of bounds."""
        return self.mean_seconds(stage, 1, a, b)

    def mean_seconds(self, first: int, count: int, a: Bounds | int, b: Bounds | int) -> Seconds:
        """Return the seconds of each of `count` stages that share nodes as a fluid."""
        kind, held = self._kinds[first], sum(self.held[first : first + count]) / count
        load, forward, saved = (matrix[a, b] / count for matrix in (kind.load, kind.forward, kind.saved))
        missing = held * saved + kind.own[a, b] / count - kind.memory
        if "offload" in self._memory_policies:
            missing = missing - max(0.0, held - AHEAD) * np.minimum(saved, kind.carried * load)
        if "recompute" in self._memory_policies:
            droppable = np.maximum(held * (saved - self._arriving[a]) - kind.remade[a, b], 0.0)
            dropped = np.clip(missing, 0.0, droppable)
            load = load + forward * dropped / np.maximum(droppable, 1.0)
            missing = missing - dropped
        return np.asarray(load + _PER_BYTE * np.maximum(missing, 0.0))

    def mean_load(self, first: int, count: int, a: Bounds | int, b: Bounds | int) -> Seconds:
        """Return the seconds of F and B of each of `count` stages: no partition of these nodes is quicker."""
        return np.asarray(np.minimum.reduce([self._kinds[s].load[a, b] for s in self._different(first, count)]) / count)

    def mean_bytes(self, first: int, count: int, a: Bounds | int, b: Bounds | int) -> NDArray[np.float64]:
        """Return the bytes of each of `count` stages if nothing is squeezed."""
        kind, held = self._kinds[first], sum(self.held[first : first + count]) / count
        return np.asarray((held * kind.saved[a, b] + kind.own[a, b]) / count)

    def _different(self, first: int, count: int) -> list[int]:
        """Return one stage of every kind among some."""
        return list({id(self._kinds[s]): s for s in range(first, first + count)}.values())


def _largest(units: NDArray[np.float64]) -> Matrix:
    """Return, for all pairs of bounds, the largest amount of a unit between them."""
    found = np.zeros((len(units) + 1, len(units) + 1))
    for a in range(len(units)):
        found[a, a + 1 :] = np.maximum.accumulate(units[a:])
    return found


class _Halving:
    """The best partitions of parts of the graph."""

    def __init__(self, model: StageTimes) -> None:
        self._model = model
        self._known: dict[tuple[int, int, int, int], tuple[float, tuple[int, ...]]] = {}
        self._too_slow: dict[tuple[int, int, int, int], float] = {}  # no partition is quicker than this

    def best(self, a: int, b: int, first: int, count: int, limit: float) -> tuple[float, tuple[int, ...]]:
        """Return the largest time and the cuts of `count` stages from bound a to bound b; infinity if above `limit`.

        Args:
            a: where they begin.
            b: where they end.
            first: number of the first of them.
            count: how many there are.
            limit: time at which they are of no use.
        """
        if count == 1:
            return float(self._model.seconds(first, a, b)), ()
        key = (a, b, first, count)
        if key in self._known:
            return self._known[key]
        if self._too_slow.get(key, -math.inf) >= limit:
            return math.inf, ()
        best, cuts = self._halved(a, b, first, count, limit)
        if best < limit:
            self._known[key] = best, cuts
        else:
            self._too_slow[key] = limit
        return (best, cuts) if best < limit else (math.inf, ())

    def _halved(self, a: int, b: int, first: int, count: int, limit: float) -> tuple[float, tuple[int, ...]]:
        left, right = count // 2, count - count // 2
        candidates = self._candidates(a, b, first, count)
        if count == 2:
            times = np.maximum(self._model.seconds(first, a, candidates), self._model.seconds(first + 1, candidates, b))
            i = int(times.argmin())
            return float(times[i]), (int(candidates[i]),)
        bounds = np.maximum(
            self._model.mean_load(first, left, a, candidates), self._model.mean_load(first + left, right, candidates, b)
        )
        best, cuts = limit, ()
        for x, bound in zip(candidates.tolist(), bounds.tolist(), strict=True):
            if bound >= best:
                continue
            before, there = self.best(a, x, first, left, best)
            if before >= best:
                continue
            behind, then = self.best(x, b, first + left, right, best)
            if max(before, behind) < best:
                best, cuts = max(before, behind), (*there, x, *then)
        return best, cuts

    def _candidates(self, a: int, b: int, first: int, count: int) -> Bounds:
        """Return cuts worth trying, the most promising first."""
        left, right = count // 2, count - count // 2
        cuts = np.arange(a + left, b - right + 1)
        model = self._model
        low, high = interval(
            model.mean_load(first, left, a, cuts) - model.mean_load(first + left, right, cuts, b),
            model.mean_bytes(first, left, a, cuts) - model.mean_bytes(first + left, right, cuts, b),
        )
        tried = len(cuts) if count == 2 else next((most for stages, most in _TRIED if count <= stages), 1)
        wider = max(_WIDER, (tried - (high - low)) // 2 + 1)
        cuts = cuts[max(0, low - wider) : high + wider + 1]
        means = np.maximum(model.mean_seconds(first, left, a, cuts), model.mean_seconds(first + left, right, cuts, b))
        return cuts[np.argsort(means, kind="stable")[:tried]]


def interval(times: Seconds, memories: NDArray[np.float64]) -> tuple[int, int]:
    """Return the first and the last cut between balance of time and balance of memory.

    Args:
        times: for every cut, the time of what lies before it less that of what lies behind; never falling.
        memories: the same of memory.

    Returns:
        Indices of cuts. Where no cut balances, the ones on both sides count.
    """
    ends = [int(np.searchsorted(rising, 0.0)) for rising in (times, memories)]
    last = len(times) - 1
    return max(0, min(ends) - 1), min(last, max(ends))
