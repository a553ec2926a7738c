"""PipeDream planner, as a baseline: the slowest stage or link of the steady state is as fast as possible.

As in Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), section 3.1. Level k
of the cluster has m_k components of level k - 1, with bandwidth B_k between them; T_l, a_l, w_l are seconds, output and
parameters of layer l for a mini-batch:

    A^0(i -> j)      sum of T_l
    T^k(i -> j, m) = 1/m max(A^(k-1)(i -> j, m_(k-1)), 2 (m - 1) sum of w_l / B_k)       replicated on m components
    A^k(i -> j, m) = min over s, m' of max(A^k(i -> s, m - m'), 2 a_s / B_k, T^k(s+1 -> j, m'))
    A^k(i -> j, 1) = A^(k-1)(i -> j, m_(k-1))

    flat           one level: all devices, with the least bandwidth between neighbours
    hierarchical   two: devices of a host, hosts; only where all hosts have the same devices
    straight       flat, without replicas

In the published source (msr-fiddle/pipedream, `optimizer_graph_hierarchical.py`) the seconds of a replicated stage are
a sum, (T + 4 (m - 1) w / (m B)) / m, and links count only if a flag says so, with 2 a / (B m'); neither is done here.
As there, a stage is cut at antichains, whose bytes are all that crosses, and has to have memory for what is in flight.

A mini-batch is what the profile was taken with (`Graph.samples`): after it PipeDream updates the weights. Ours: what
crosses is counted in both directions as it is, not twice the output; devices of different speed share in proportion;
memory is that of one version of the weights; sums of gradients that were measured take what was measured;
micro-batches, of which PipeDream has none, are as many as keep the pipeline full for most of a batch; positions are few
(`worthwhile`) and then all near the cuts that were found. Left out, as there: latency, what hosts share, time to fill
the pipeline.

Time: O(V R N^2) flat, O(d R N^3 + h R N^2) hierarchical, twice.

Legend: V workers, d devices of each of h hosts, R numbers of workers that a stage may take, N bounds a, b.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.cluster import Cluster
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.candidates.cut_points import around, cuttable, worthwhile
from lightning_pipe.planner.candidates.device_order import bandwidth
from lightning_pipe.planner.estimates.block_costs import BlockCosts, DeviceRow, within_memory
from lightning_pipe.planner.estimates.recurrence import Estimator, microbatch_counts
from lightning_pipe.planner.estimates.stage_costs import Matrix, StageCostTable
from lightning_pipe.planner.problem import Problem

View = Literal["flat", "hierarchical", "straight"]
Held = Literal["noam", "one", "none"]
Vector = NDArray[np.float64]
Load = Callable[[int, int], Matrix]

_MOST_UNITS = 128
_MOST_POSITIONS = 100
_POSITIONS_AND_UNITS = 4096  # at most so many positions times units
_LEAST_POSITIONS = 40
_MOST_OUTLINES = 8
_PER_VIEW = 4  # plans of each view, which differ in the replicas of the last stage
_PER_STAGE = 8  # micro-batches per stage, at most
_LEAST_COUNT = 4  # micro-batches of a pipeline, for which its replicas are few enough
_SMALLEST_PART = 32  # of a batch: micro-batches for whose samples memory is tested
_HELD: tuple[Held, ...] = (
    "noam",
    "one",
    "none",
)  # micro-batches that a stage has to have memory for, until a plan does


@dataclass(frozen=True)
class SteadyPlan:
    """Stages on workers.

    Attributes:
        view: how the cluster was seen.
        cuts: graph positions at which stages 1, 2, ... begin.
        ranks: ranks of each stage.
        seconds: of the slowest stage or link for a mini-batch.
    """

    view: View
    cuts: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    seconds: float


def pipedream(problem: Problem) -> list[Candidate]:
    """Return at most 8 outlines, those that seem to fit into memory first, then by their slowest stage or link."""
    plans = steady_plans(problem)
    estimator = Estimator(StageCostTable(problem, sorted({cut for plan in plans for cut in plan.cuts})))
    found: dict[Candidate, bool] = {}
    for plan in plans:
        outline, missing = _outline(plan, estimator)
        found.setdefault(outline, missing > 0)
    return sorted(found, key=lambda outline: found[outline])[:_MOST_OUTLINES]


def noam_depths(replicas: Sequence[int]) -> tuple[int, ...]:
    """Return the mini-batches in flight in each stage: workers from it on, divided by its replicas.

    For the first stage that is the paper's NOAM, ceil(workers / replicas of the input stage). Ours: at least one more
    than the next stage has, since replicas share every micro-batch, and stages with equal depths wait for each other.
    """
    found = [0]
    for s in range(len(replicas) - 1, -1, -1):
        found.append(max(math.ceil(sum(replicas[s:]) / replicas[s]), found[-1] + 1))
    return tuple(found[:0:-1])


def _outline(plan: SteadyPlan, estimator: Estimator) -> tuple[Candidate, float]:
    """Return the outline with the paper's depths within memory, or those wished for, and the bytes that are missing."""
    constraints, stages = estimator.problem.constraints, len(plan.ranks)
    counts = microbatch_counts(estimator.problem, stages=stages, replicas=max(map(len, plan.ranks)))
    count = max(count for count in counts if count <= _PER_STAGE * stages or count == counts[0])
    if constraints.warmup is not None or constraints.schedule not in (None, "1f1b"):
        outline, _, missing = estimator.outline(plan.cuts, plan.ranks, count)
        return outline, missing
    depths = noam_depths([len(group) for group in plan.ranks])
    return within_memory(estimator, Candidate(plan.cuts, plan.ranks, count, depths))


def steady_plans(problem: Problem) -> list[SteadyPlan]:
    """Return plans, the best of every view among them, the best first."""
    allowed = cuttable(problem.graph, sliced=True)
    row = DeviceRow(problem.cluster, range(problem.cluster.ranks), most=_MOST_UNITS)
    most = max(_LEAST_POSITIONS, min(_MOST_POSITIONS, _POSITIONS_AND_UNITS // len(row)))
    positions = worthwhile(problem, sliced=True, most=most)
    found = _found(problem, row, positions)
    if len(positions) < len(allowed):
        cuts = sorted({cut for plan in _best_of_views(found) for cut in plan.cuts})
        found = [*found, *_found(problem, row, around(allowed, cuts, most=most))]
    different = {plan.ranks: plan for plan in sorted(found, key=_value, reverse=True)}
    best = _best_of_views(found)
    others = [plan for plan in different.values() if plan not in best]
    return sorted([*best, *sorted(others, key=_value)[: _MOST_OUTLINES - len(best)]], key=_value)


def _value(plan: SteadyPlan) -> tuple[float, int, tuple[int, ...]]:
    return plan.seconds, len(plan.cuts), plan.cuts


def _best_of_views(plans: Sequence[SteadyPlan]) -> list[SteadyPlan]:
    views = {plan.view: plan for plan in sorted(plans, key=_value, reverse=True)}
    return list(views.values())


def _found(problem: Problem, row: DeviceRow, positions: Sequence[int]) -> list[SteadyPlan]:
    """Return plans over some positions; with less regard for memory, and for shares, if there are none with more."""
    segments = StageCostTable(problem, positions)
    for held in _HELD:
        for may_be_small in (False, True):
            views = _Views(segments, row, held=held, may_be_small=may_be_small)
            found = [*views.flat(), *views.hierarchical(), *views.straight()]
            if found:
                return found
    raise AssertionError("one stage on all devices is always possible")


class _Views:
    """Plans over the bounds of some segments.

    Args:
        segments: costs of all stages.
        row: all devices, in the order of their ranks.
        held: micro-batches that a stage has to have memory for.
        may_be_small: whether replicas may get less than their least samples.
    """

    def __init__(self, segments: StageCostTable, row: DeviceRow, *, held: Held, may_be_small: bool) -> None:
        self._problem, self._segments, self._row, self._held = segments.problem, segments, row, held
        problem = self._problem
        samples, constraints = min(problem.graph.samples, problem.samples), problem.constraints
        is_stage = np.triu(np.ones((segments.units + 1,) * 2, dtype=bool), k=1)
        seconds = segments.forward_s.all(samples)
        if problem.training:
            seconds = seconds + segments.backward_s.all(samples)
        self._seconds = np.where(is_stage, seconds, np.inf)
        self._weights = segments.trained_bytes * problem.training
        directions = segments.crossing.values() if problem.training else [segments.crossing["F"]]
        self._crossing: Vector = np.add.reduce([crossing.bytes(samples) for crossing in directions])
        counts = constraints.microbatches or max(1, min(problem.samples // constraints.least_samples, _SMALLEST_PART))
        self._part = problem.samples / counts
        least = min(constraints.least_samples, problem.samples)
        shares = math.inf if may_be_small else problem.samples // least
        self._most_replicas = np.full_like(self._seconds, shares / (constraints.microbatches or _LEAST_COUNT))
        self._most_replicas[0, -1] = shares / (constraints.microbatches or 1)

    def flat(self) -> Iterator[SteadyPlan]:
        """Yield plans of the flat view, the best first: some, by the number of workers of the last stage."""
        yield from self._of_one_level("flat", self._row.degrees)

    def straight(self) -> Iterator[SteadyPlan]:
        """Yield the plan without replicas, if there are enough positions."""
        if all(len(unit) == 1 for unit in self._row.units):
            yield from self._of_one_level("straight", (1,))

    def _of_one_level(self, view: View, degrees: Sequence[int]) -> Iterator[SteadyPlan]:
        rate = slowest_neighbours(self._problem.cluster, range(self._problem.cluster.ranks))
        level = Level(self._load(self._row, rate), self._crossing / rate, workers=len(self._row), degrees=degrees)
        for seconds, stages in itertools.islice(level.plans(0, self._segments.units, len(self._row)), _PER_VIEW):
            ranks = tuple(self._row.ranks(stage.first, stage.count) for stage in stages)
            yield SteadyPlan(view, self._cuts([stage.b for stage in stages[:-1]]), ranks, seconds)

    def _load(self, row: DeviceRow, rate: float) -> Load:
        """Return T of a stage on a block of some devices with this bandwidth, infinite where memory forbids it."""
        blocks = BlockCosts(self._segments, row, samples=self._part)

        @functools.cache
        def load(first: int, count: int) -> Matrix:
            replicas = row.devices(first, count)
            sums = self._sums_s(row.ranks(first, count), rate)
            seconds = np.maximum(self._seconds / row.speed(first, count), sums)
            seconds[replicas > self._most_replicas] = np.inf
            if self._held == "none":
                return seconds
            needed = math.ceil((len(row) - first) / count) if self._held == "noam" else 1
            return np.where(blocks.in_flight(first, count) >= needed, seconds, np.inf)

        return load

    def _sums_s(self, ranks: tuple[int, ...], rate: float) -> Matrix:
        """Return the seconds of the sum of every stage's gradients over these ranks: measured, or by the formula."""
        measured = self._problem.cluster.reduction(sorted(ranks)) if len(ranks) > 1 else None
        if measured is None:
            formula: Matrix = 2 * (len(ranks) - 1) * self._weights / rate / len(ranks)
            return formula
        ways: Matrix = np.stack([way.latency_s + self._weights / way.bytes_per_s for way in measured.ways])
        return np.where(self._weights > 0, ways.min(axis=0), 0.0)

    def hierarchical(self) -> Iterator[SteadyPlan]:
        """Yield the plans of the view with two levels: some, by the number of hosts of the last."""
        hosts = self._problem.cluster.hosts
        devices = len(hosts[0].devices)
        is_uneven = any(host.devices != hosts[0].devices for host in hosts)
        if len(hosts) == 1 or devices == 1 or is_uneven:
            return
        row = DeviceRow(self._problem.cluster, range(devices), most=devices)
        rate = slowest_neighbours(self._problem.cluster, range(devices))
        inside = Level(
            self._load(row, rate),
            self._crossing / rate,
            workers=devices,
            degrees=row.degrees,
            starts=self._segments.units + 1,
        )
        borders = [(h * devices - 1, h * devices) for h in range(1, len(hosts))]
        network = min(bandwidth(self._problem.cluster, *border) for border in borders)
        alone = inside.best(devices)

        def load(first: int, count: int) -> Matrix:
            seconds: Matrix = np.maximum(alone, 2 * (count - 1) * self._weights / network) / count
            return seconds

        between = Level(load, self._crossing / network, workers=len(hosts), degrees=range(1, len(hosts) + 1))
        for seconds, stages in itertools.islice(between.plans(0, self._segments.units, len(hosts)), _PER_VIEW):
            plan = self._unfolded(seconds, stages, inside, devices)
            if max(map(len, plan.ranks)) <= self._most_replicas[0, -1 if len(plan.ranks) == 1 else 1]:
                yield plan

    def _unfolded(self, seconds: float, blocks: Sequence[WorkerStage], inside: Level, devices: int) -> SteadyPlan:
        """Return the plan in which every block of hosts runs the stages that each of its hosts would run alone."""
        ends, ranks = [], []
        for block in blocks:
            _, stages = next(inside.plans(block.a, block.b, devices))
            for stage in stages:
                ends.append(stage.b)
                hosts = range(block.first, block.first + block.count)
                own = range(stage.first, stage.first + stage.count)
                ranks.append(tuple(host * devices + device for host in hosts for device in own))
        return SteadyPlan("hierarchical", self._cuts(ends[:-1]), tuple(ranks), seconds)

    def _cuts(self, bounds: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(self._segments.bounds[bound]) for bound in bounds)


def slowest_neighbours(cluster: Cluster, ranks: Sequence[int]) -> float:
    """Return the least bytes per second between ranks that follow each other; infinite for one rank."""
    return min((bandwidth(cluster, u, v) for u, v in itertools.pairwise(ranks)), default=math.inf)


@dataclass(frozen=True)
class WorkerStage:
    """Layers from bound a to bound b on `count` workers from `first` on."""

    a: int
    b: int
    first: int
    count: int


class Level:
    """A^k of one level, from all of the first `starts` bounds to all bounds.

    Args:
        load: T^k as [a, b] for the first worker and the number of them.
        links: seconds of what crosses every bound.
        workers: components of the level.
        degrees: numbers of them that a stage may take.
        starts: bounds at which a range may begin.
    """

    def __init__(self, load: Load, links: Vector, *, workers: int, degrees: Sequence[int], starts: int = 1) -> None:
        self._load, self._links, self._degrees, self._starts = load, links, sorted(degrees), starts
        self._best: dict[int, Matrix] = {}
        for m in range(1, workers + 1):
            self._best[m] = self._least(m)

    def best(self, workers: int) -> Matrix:
        """Return A^k(a -> b, workers)."""
        return self._best[workers]

    def _least(self, m: int) -> Matrix:
        found = np.full((self._starts, len(self._links)), np.inf)
        for degree in self._degrees:
            if degree <= m:
                found = np.minimum(found, self._with_last(m, degree).min(axis=1))
        return found

    def _with_last(self, m: int, degree: int, start: int | None = None) -> NDArray[np.float64]:
        """Return [i, s, j]: the slowest of a range i -> j if its last stage s -> j has so many of its m workers."""
        load = self._load(m - degree, degree)
        chosen = slice(0, self._starts) if start is None else slice(start, start + 1)
        if degree == m:
            return load[chosen, None, :]
        before = np.maximum(self._best[m - degree][chosen], self._links)
        slowest: NDArray[np.float64] = np.maximum(before[:, :, None], load[None, :, :])
        return slowest

    def plans(self, a: int, b: int, workers: int) -> Iterator[tuple[float, list[WorkerStage]]]:
        """Yield the best plan of a range for every number of workers of its last stage, the best first."""
        values = []
        for degree in self._degrees:
            if degree <= workers:
                last = self._with_last(workers, degree, a)[0, :, b]
                values.append((float(last.min()), degree, int(last.argmin())))
        for seconds, degree, s in sorted(values):
            if seconds == math.inf:
                return
            yield seconds, self._traced(a, b, workers, degree, s)

    def _traced(self, a: int, b: int, workers: int, degree: int, s: int) -> list[WorkerStage]:
        if degree == workers:
            return [WorkerStage(a, b, 0, workers)]
        _, before = next(self.plans(a, s, workers - degree))
        return [*before, WorkerStage(s, b, workers - degree, degree)]
