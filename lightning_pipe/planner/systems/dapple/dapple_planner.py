"""DAPPLE planner: any number of stages, replicated unequally, placed by three policies.

After Fan et al., DAPPLE: A Pipelined Data Parallel Approach for Training Large Models (PPoPP 2021), section 4.

The paper's:

    plans       hybrid plans by the recursion TPL(j, m, g) (`planner.systems.dapple.dapple_search`), placed by D(g, n)
                (`placement`); data parallel (one stage) and straight plans (no replication) are special cases
    value       the latency of eq. 1 to 3, links as stages (`dapple_latency`); of data parallel training with
                gradient accumulation and sums of gradients that overlap with backward, on micro-batches as large as
                memory allows
    warm-up     PA or PB, as memory allows

Ours:

    - the formula prunes, an event simulation decides: the formula leaves bubbles of the pivot out, which are the more
      the more stages and the fewer micro-batches there are, so it prefers pipelines that are slow in fact. The best
      plans of every number of stages by the formula are ranked by `row_s` with the best warm-up;
    - several numbers of micro-batches are tried: the paper takes as many as a batch has slices of the profiled size;
    - samples are whole in the ranking: three replicas of a micro-batch of four samples take as long as two samples do.
      In the recursion and in the formula, as in the paper, they are divided evenly;
    - cuts are searched at few positions, then moved, one at a time, while the formula falls;
    - stages of equal replication, straight ones among them, are also cut by `balance`, so that pipelines with
      more stages than the recursion reaches are there.

Data parallel training is ranked by its formula, whose overlap the programs here do not have: they sum after the last
backward. So it ranks better than the simulator then judges it.

Growth: O(counts · stages · states · degrees · bounds²), see `dapple_search`; the numbers are bounded below.

Legend: M micro-batches, G devices.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_pipe.planner.candidates.candidate import Candidate, never_growing, share_of
from lightning_pipe.planner.candidates.cut_points import worthwhile
from lightning_pipe.planner.estimates.balance import Balancer
from lightning_pipe.planner.estimates.recurrence import Estimator, microbatch_counts, row_s
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.systems.dapple.dapple_latency import data_parallel_s, elements_of, latency_s
from lightning_pipe.planner.systems.dapple.dapple_search import DappleCosts, Network, Ranks, SearchLimits, search

_MOST_OUTLINES = 8
_MOST_ALIKE = 2  # outlines with the same ranks
_DIGITS = 9  # of seconds that are compared; then fewer stages and micro-batches are better
_FEW_DEVICES = 16  # up to which every number of replicas is tried
_FEW_HOSTS = 16  # up to which every number of whole hosts is tried
_SMALL_DEGREES = (1, 2, 3, 4, 6, 8)  # beyond: these, and half, one, two, three, ... whole hosts
_REFINED = 3  # plans of each number of stages whose cuts are moved and that are simulated
_COUNTED = 4  # numbers of micro-batches of a plan that are simulated
_NEAR = 1.2  # times the best promise
_MOST_WALKED = 8192  # stages times micro-batches of a plan that is simulated, a third of a microsecond each
_MOST_STRAIGHT = 64  # stages of equal replication
_ROUNDING = 1e-9  # of numbers of samples
_STEPS = (8, 3, 1)  # positions by which cuts are moved
_FINE = 400  # positions between which cuts are moved


@dataclass(frozen=True)
class Ranked:
    """An outline with what it is ranked by.

    Attributes:
        outline: the plan.
        latency_s: seconds of a batch by the paper's formula, and of the optimizer.
        ideal_s: simulated seconds of the same, of data parallel training `latency_s`.
        seconds: by which it is ranked: `ideal_s` with whole samples, the largest slice of every stage counting.
        excess: bytes by which it is estimated to exceed memory; 0 or less if it fits.
    """

    outline: Candidate
    latency_s: float
    ideal_s: float
    seconds: float
    excess: float


def dapple(problem: Problem) -> list[Candidate]:
    """Return the best outlines by DAPPLE, the best first.

    Args:
        problem: what is planned.
    """
    return [found.outline for found in ranked(problem)[:_MOST_OUTLINES]]


def ranked(problem: Problem) -> list[Ranked]:
    """Return the best outlines of all numbers of stages with what they are ranked by, those that fit first."""
    found: dict[Candidate, Ranked] = {}
    alike: Counter[object] = Counter()
    for one in sorted(_Planner(problem).ranked(), key=_rank):
        if one.outline not in found and alike[one.outline.ranks] < _MOST_ALIKE:
            found[one.outline] = one
            alike[one.outline.ranks] += 1
    return list(found.values())


def _rank(one: Ranked) -> tuple[float, float, int, int]:
    seconds = float(f"{one.seconds:.{_DIGITS}g}")
    return max(0.0, one.excess), seconds, len(one.outline.ranks), one.outline.microbatches


@dataclass(frozen=True)
class _Layout:
    cuts: tuple[int, ...]
    ranks: tuple[Ranks, ...]


@dataclass(frozen=True)
class _Effort:
    """How much is searched: less of everything on more devices.

    Attributes:
        bounds: positions to cut at.
        stages: stages of a hybrid plan at most.
        states: occupations kept for each number of stages.
        counts: numbers of micro-batches.
        kept: plans of each number of stages and micro-batches.
        moves: of the cuts of a plan, for one step.
    """

    bounds: int
    stages: int
    states: int
    counts: int
    kept: int
    moves: int


_EFFORTS = ((8, _Effort(64, 8, 32, 8, 2, 240)), (16, _Effort(48, 8, 16, 8, 2, 240)), (64, _Effort(40, 6, 8, 4, 1, 240)))
_LEAST_EFFORT = _Effort(32, 4, 4, 3, 1, 32)


class _Planner:
    def __init__(self, problem: Problem) -> None:
        self._problem, self._devices = problem, problem.cluster.ranks
        self._effort = next((effort for most, effort in _EFFORTS if self._devices <= most), _LEAST_EFFORT)
        coarse = worthwhile(problem, sliced=True, most=self._effort.bounds)
        speeds = {problem.cluster.device(rank).speed for rank in range(self._devices)}
        is_sliced = len(speeds) > 1 or bool(problem.graph.coupled)  # however equal the numbers of replicas are
        positions = sorted({*worthwhile(problem, sliced=is_sliced, most=_FINE), *coarse})
        self._estimator = Estimator(StageCostTable(problem, positions))
        self._positions = positions
        self._place = {position: place for place, position in enumerate(positions)}
        self._bounds = [0, *(positions.index(cut) + 1 for cut in coarse), len(positions) + 1]

    def ranked(self) -> list[Ranked]:
        """Return plans of all numbers of stages."""
        by_stages: dict[int, list[Ranked]] = {}
        for layout, count in dict.fromkeys((*self._hybrid(), *self._straight())):
            by_stages.setdefault(len(layout.ranks), []).append(self._estimated(layout, count))
        found = [*self._data_parallel()]
        for some in by_stages.values():
            some.sort(key=_rank)
            layouts = dict.fromkeys(
                self._moved(_Layout(one.outline.cuts, one.outline.ranks), one.outline.microbatches)
                for one in some[:_REFINED]
            )
            found.extend(some)
            found.extend(self._estimated(layout, count) for layout in layouts for count in self._likely_counts(layout))
        return found

    def _hybrid(self) -> Iterator[tuple[_Layout, int]]:
        """Yield plans of the recursion, with their numbers of micro-batches."""
        network = Network(self._problem)
        for count in self._counts():
            most_replicas = max(1, self._problem.samples // (count * self._problem.constraints.least_samples))
            limits = SearchLimits(self._degrees(), self._effort.stages, self._effort.states, most_replicas)
            costs = DappleCosts(self._estimator.segments, self._bounds, network, microbatches=count)
            for found in search(costs, limits, kept=self._effort.kept):
                yield _Layout(found.cuts, found.ranks), count

    def _degrees(self) -> tuple[int, ...]:
        if self._devices <= _FEW_DEVICES:
            return tuple(range(1, self._devices))
        host = max(len(host.devices) for host in self._problem.cluster.hosts)
        hosts = self._devices // host
        whole = {host * count for count in range(1, hosts)} if hosts <= _FEW_HOSTS else set()
        halves = {self._devices >> shift for shift in range(1, self._devices.bit_length())}
        small = {degree for degree in _SMALL_DEGREES if degree <= host} if hosts <= _FEW_HOSTS else {1, host}
        return tuple(sorted(degree for degree in {*small, *whole, *halves} if degree < self._devices))

    def _counts(self) -> list[int]:
        """Return the numbers of micro-batches that are searched, spread evenly over those that are worth trying."""
        depths = (1, 2, 3, 4, self._effort.stages)
        degrees = (1, *self._degrees()[: self._devices - 1])
        counts = sorted(
            {c for s in depths for r in degrees for c in microbatch_counts(self._problem, stages=s, replicas=r)}
        )
        counts = (
            counts[1:] if counts[0] == 1 < len(counts) else counts
        )  # one micro-batch keeps one stage busy at a time
        steps = self._effort.counts
        if len(counts) <= steps:
            return counts
        wanted = [counts[0] * (counts[-1] / counts[0]) ** (i / (steps - 1)) for i in range(steps)]
        return sorted({min(counts, key=lambda count: abs(count - want)) for want in wanted})

    def _straight(self) -> Iterator[tuple[_Layout, int]]:
        """Yield plans of equal replication on consecutive ranks, balanced."""
        balancer = Balancer(self._estimator)
        for stages in range(2, min(self._devices, len(self._positions) + 1, _MOST_STRAIGHT) + 1):
            if self._devices % stages:
                continue
            each = self._devices // stages
            ranks = tuple(tuple(range(s * each, (s + 1) * each)) for s in range(stages))
            most = microbatch_counts(self._problem, stages=stages, replicas=each)[-1]
            for cuts in balancer.variants(ranks, most):
                layout = _Layout(cuts, ranks)
                yield layout, self._likely_counts(layout)[0]

    def _estimated(self, layout: _Layout, count: int) -> Ranked:
        """Simulate a plan with evenly divided samples and with whole ones, which may need less warm-up."""
        outline, ideal, excess = self._estimator.outline(layout.cuts, layout.ranks, count)
        parts, latency = self._parts(layout, count), self._latency_s(layout, count)
        if max(parts) <= 1 + _ROUNDING:
            return Ranked(outline, latency, ideal, ideal, excess)
        row = self._estimator.row(layout.cuts, layout.ranks, count)
        rooms = self._estimator.rooms(layout.cuts, layout.ranks, count)
        whole = replace(
            row,
            forward=tuple(f * part for f, part in zip(row.forward, parts, strict=True)),
            backward=tuple(b * part for b, part in zip(row.backward, parts, strict=True)),
        )
        most = [int(room.bytes / (room.saved * part or 1.0)) for room, part in zip(rooms, parts, strict=True)]
        depths = outline.depths
        if excess <= 0 and not self._problem.constraints.memory_policies:
            depths = never_growing([max(1, min(pair)) for pair in zip(depths, most, strict=True)])
            held = zip(rooms, parts, depths, strict=True)
            excess = max(room.saved * part * depth - room.bytes for room, part, depth in held)
        seconds = max(ideal, row_s(whole, depths=depths, microbatches=count))
        return Ranked(replace(outline, depths=depths), latency, ideal, seconds, excess)

    def _parts(self, layout: _Layout, count: int) -> list[float]:
        """Return by how much the largest slice of each stage exceeds an even one."""
        samples, graph = self._problem.samples / count, self._problem.graph
        ends = itertools.pairwise((0, *layout.cuts, len(graph.nodes)))
        found = []
        for (begin, end), (a, b), group in zip(ends, self._estimator.stages(layout.cuts), layout.ranks, strict=True):
            even = max(n for n, _ in self._estimator.slices(a, b, group, samples))
            largest = math.ceil(math.ceil(samples) * even / samples - _ROUNDING)
            is_cut = share_of(graph, begin, end, replicas=len(group)) == "samples"
            found.append(max(1, largest) / even if is_cut else math.ceil(samples) / samples)
        return found

    def _latency_s(self, layout: _Layout, count: int) -> float:
        row = self._estimator.row(layout.cuts, layout.ranks, count)
        return latency_s(elements_of(row), count) + row.step

    def _promise(self, layout: _Layout, count: int) -> tuple[float, float]:
        """Return (bytes over memory, seconds): by the formula where memory allows the warm-up that it is made for."""
        rooms = self._estimator.rooms(layout.cuts, layout.ranks, count)
        held = (min(count, len(rooms) - s) for s in range(len(rooms)))
        if all(depth * room.saved <= room.bytes for depth, room in zip(held, rooms, strict=True)):
            return 0.0, self._latency_s(layout, count)
        _, seconds, excess = self._estimator.outline(layout.cuts, layout.ranks, count)
        return max(0.0, excess), seconds

    def _likely_counts(self, layout: _Layout) -> list[int]:
        """Return a few numbers of micro-batches, those that promise most first.

        The formula hardly tells them apart (each halves M and doubles the times), where in fact more of them have less
        bubbles; so of those that are near the best the largest are taken.
        """
        stages = len(layout.ranks)
        counts = microbatch_counts(self._problem, stages=stages, replicas=max(map(len, layout.ranks)))
        counts = [count for count in counts if count * stages <= _MOST_WALKED] or counts[:1]
        promises = {count: self._promise(layout, count) for count in counts}
        best = min(promises.values())
        near = [count for count in counts if promises[count][0] <= best[0] and promises[count][1] <= _NEAR * best[1]]
        return sorted(near[-_COUNTED:], key=lambda count: promises[count])

    def _moved(self, layout: _Layout, count: int) -> _Layout:
        """Move the cuts, one at a time, as long as that promises more."""
        best = self._promise(layout, count)
        for step in _STEPS:
            tried, gained = 0, True
            while gained and tried < self._effort.moves // len(layout.ranks):
                gained = False
                for other in self._near(layout, step):
                    tried += 1
                    if (0.0, self._latency_s(other, count)) >= best:
                        continue  # it cannot promise more than its formula
                    value = self._promise(other, count)
                    if value < best:
                        best, layout, gained = value, other, True
        return layout

    def _near(self, layout: _Layout, step: int) -> Iterator[_Layout]:
        unsliceable = self._problem.graph.unsliceable
        for s, cut in enumerate(layout.cuts):
            at, is_equal = self._place[cut], len(layout.ranks[s]) == len(layout.ranks[s + 1])
            low = self._place[layout.cuts[s - 1]] if s else -1
            high = self._place[layout.cuts[s + 1]] if s + 1 < len(layout.cuts) else len(self._positions)
            for place in (at - step, at + step):
                if low < place < high and (is_equal or self._positions[place] not in unsliceable):
                    cuts = (*layout.cuts[:s], self._positions[place], *layout.cuts[s + 1 :])
                    yield _Layout(cuts, layout.ranks)

    def _data_parallel(self) -> Iterator[Ranked]:
        """Yield one stage on all devices, for all numbers of micro-batches."""
        ranks = tuple(range(self._devices))
        for count in microbatch_counts(self._problem, stages=1, replicas=self._devices):
            outline, _, excess = self._estimator.outline((), (ranks,), count)
            seconds = self._data_parallel_s(ranks, count)
            whole = seconds * self._parts(_Layout((), (ranks,)), count)[0]
            yield Ranked(outline, seconds, seconds, whole, excess)

    def _data_parallel_s(self, ranks: Ranks, count: int) -> float:
        """Return the latency of data parallel training, its backward in parts between the cut positions."""
        segments, network = self._estimator.segments, Network(self._problem)
        row = self._estimator.row((), (ranks,), count)
        units = range(segments.units)
        share = max(n for n, _ in self._estimator.slices(0, segments.units, ranks, self._problem.samples / count))
        parts = [segments.backward_s.at(u, u + 1, share) for u in units]
        scale = row.backward[0] / (sum(parts) or 1.0)
        latency, per_byte = network.reduction(ranks)
        found = data_parallel_s(
            row.forward[0],
            [part * scale for part in parts],
            [float(segments.trained_bytes[u, u + 1]) for u in units],
            lambda size: latency + per_byte * size,
            count=count,
        )
        return found + row.step
