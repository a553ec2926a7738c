"""Neighborhood search: whole neighborhoods of a plan by lower bounds, the rest decided by the simulator.

Where a program is short, its bounds are nearly what the judge says (`lower_bounds`), and cost little for each
of many plans. So cuts, devices and depths are changed together, in rings around the plan:

    1  as many replicas on each stage and as many micro-batches: one cut moved, and devices moved, at once
    2  other numbers of micro-batches, one cut moved
    3  other layouts (`planner.candidates.moves`), with a cut more or less where they have a stage more or less
    4  the plans of the first ring with all depths, where these are few

and in the others the depths of the plan a little changed (of one stage, or of neighbouring stages together), and the
usual policies, each as deep as memory may ask for.

Legend: s, t stages.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from lightning_pipe.cost.prices import Pricer
from lightning_pipe.planner.candidates.candidate import Candidate, can_meet, falling, never_growing
from lightning_pipe.planner.candidates.cut_points import cuttable, nearby
from lightning_pipe.planner.candidates.moves import Ranks, different, groupings, layouts_near
from lightning_pipe.planner.estimates.bound_terms import Cuts, Parts
from lightning_pipe.planner.estimates.lower_bounds import CandidateBatch, Depths
from lightning_pipe.planner.estimates.recurrence import microbatch_counts
from lightning_pipe.planner.problem import Problem

Value: TypeAlias = tuple[float, float]  # bytes over memory, seconds
Shape: TypeAlias = tuple[int, ...]  # replicas of each stage

GROUPED = 5  # devices up to which all groupings are tried
_BOUNDED = 150_000  # instructions that bounds may take the time of, some three seconds
_PRICED = 2  # instructions in whose time a rank of a plan is priced
_LOOKED_UP = 2  # plans of which it is looked up how busy their stages are, in the time of an instruction
_ROWS = 500  # plans in an array whose bounds take twice the time of one's
_COUNTS = 2  # other numbers of micro-batches that are tried in other layouts
_FEW_CUTS = 40  # of as many, all are tried
_MOST = 40  # outlines of a ring that are judged: bounds of memory may let some through that do not fit
_FEW_PLANS = 1_000  # of as many with one number of micro-batches, all are tried
_FEW_DEPTHS = 1_000  # of as many, all are tried
_SIEVED = 16  # devices up to which bounds cost much less than judging: of more, few stand for all
_STEPS = 2  # positions by which a cut is moved
_RISES = (1, 2, 3, 4)  # by which depths of policies rise per stage from the end


class Sieve:
    """Filter of single outlines that are worth judging, by their bounds.

    Args:
        problem: what is planned.
        pricer: of its judge.
    """

    def __init__(self, problem: Problem, pricer: Pricer) -> None:
        self._parts = Parts(problem, pricer)
        self._is_of_use = problem.cluster.ranks <= _SIEVED

    def may_be_better(self, outline: Candidate, than: Value) -> bool:
        """Return whether a plan, or the same with other depths if memory needs them, may be better; in doubt it may."""
        if not self._is_of_use or than[0] > 0:
            return True
        field = CandidateBatch(self._parts, [(outline.cuts, outline.ranks)], outline.microbatches)
        if field.least_s()[0] >= than[1]:
            return False
        return bool(field.seconds(outline.depths)[0] < than[1] or field.lacking(outline.depths)[0] > 0)


class CandidateSet(NamedTuple):
    """Plans that are bounded together, with every one of the depths."""

    plans: tuple[tuple[Cuts, Ranks], ...]
    microbatches: int
    depths: tuple[Depths, ...]


class Neighborhood:
    """Plans near others.

    Args:
        problem: what is planned; its warm-up is open.
        parts: its prices.

    Attributes:
        left: what bounds may still take the time of, in instructions that the judge could walk through.
    """

    def __init__(self, problem: Problem, parts: Parts) -> None:
        self._problem, self._parts = problem, parts
        self._is_open = problem.training and problem.constraints.schedule != "gpipe"
        self.left = _BOUNDED
        self._positions = cuttable(problem.graph, sliced=True)
        ranks = problem.cluster.ranks
        is_open = ranks <= GROUPED and problem.constraints.replicas is None
        self._groupings = [*different(groupings(range(ranks)), problem.cluster)] if is_open else []

    def rings(self, outline: Candidate) -> Iterator[CandidateSet]:
        """Yield the plans around an outline, the nearest first."""
        shape, moved = shape_of(outline.ranks), self._moved(outline.cuts)
        layouts = self._layouts(outline.ranks)
        alike = [outline.ranks, *layouts.pop(shape, ())]
        yield self._ring(itertools.product(moved, alike), outline.microbatches, outline.depths)
        for count in self._counts(shape, outline.microbatches):
            yield self._ring(((cuts, outline.ranks) for cuts in moved), count, outline.depths)
        for other, found in layouts.items():
            plans = [*itertools.product(self._recut(outline.cuts, len(other)), found)]
            most = max(1, self._problem.samples // (self._problem.constraints.least_samples * max(other)))
            count = min(outline.microbatches, most)
            counts = sorted(self._counts(other, count), key=lambda near: abs(near - count))
            for near in (count, *counts[:_COUNTS]):
                yield self._ring(plans, near, ())
        stages, count = len(shape), outline.microbatches
        if math.comb(count + stages - 1, stages) <= _FEW_DEPTHS and self._is_open:
            every = itertools.combinations_with_replacement(range(count, 0, -1), stages)
            yield CandidateSet(tuple(dict.fromkeys(itertools.product(moved, alike))), count, tuple(every))

    def sweep(self, outlines: Iterable[Candidate]) -> Iterator[CandidateSet]:
        """Yield the plans of outlines, with the usual depths; where plans alike are few, all of them."""
        alike: dict[tuple[Shape, int], list[tuple[Cuts, Ranks]]] = {}
        for outline in outlines:
            shape, count = shape_of(outline.ranks), outline.microbatches
            every = self._every(shape)
            for near in (count, *self._counts(shape, count)) if every else (count,):
                plans = alike.setdefault((shape, near), every)
                if not every:
                    plans.append((outline.cuts, outline.ranks))
        for (_, count), plans in alike.items():
            yield self._ring(plans, count, ())

    def _every(self, shape: Shape) -> list[tuple[Cuts, Ranks]]:
        """Return all cuts with all ranks, or nothing if they are many, or there are no groupings to choose from."""
        ranks = [one for one in self._groupings if shape_of(one) == shape]
        if not ranks or len(ranks) * math.comb(len(self._positions), len(shape) - 1) > _FEW_PLANS:
            return []
        return [*itertools.product(itertools.combinations(self._positions, len(shape) - 1), ranks)]

    def better(self, ring: CandidateSet, than: Value) -> list[Candidate]:
        """Return the outlines of a ring that may be better, the most promising first; none if nothing is left."""
        if self.left <= 0:
            return []
        plans = [plan for plan in ring.plans if can_meet(self._problem, *plan)]
        if than[0] <= 0:
            self.left -= len(plans) // _LOOKED_UP
            plans = [plan for plan in plans if self._parts.least_s(*plan, ring.microbatches) < than[1]]
        if not plans:
            return []
        field = CandidateBatch(self._parts, plans, ring.microbatches)
        self.left -= _PRICED * self._problem.cluster.ranks * len(plans)
        if than[0] <= 0:
            field = field.only(np.flatnonzero(field.least_s() < than[1]))
        if not field.plans:
            return []
        walked = len(ring.depths) * len(plans[0][1]) * ring.microbatches
        self.left -= walked + walked * len(field.plans) // _ROWS
        found: list[tuple[float, float, int, Candidate]] = []
        nothing = np.zeros(len(field.plans))
        is_roomy = bool((field.lacking((ring.microbatches,) * len(plans[0][1])) <= 0).all())  # for whatever depths
        for depths in ring.depths:
            excess = nothing if is_roomy else np.maximum(field.lacking(depths), 0.0)
            if (excess > than[0]).all():
                continue
            seconds = field.seconds(depths)
            for i in np.lexsort((seconds, excess))[:_MOST].tolist():
                if (excess[i], seconds[i]) < than:
                    cuts, ranks = field.plans[i]
                    outline = Candidate(cuts, ranks, ring.microbatches, depths)
                    found.append((float(excess[i]), float(seconds[i]), len(found), outline))
        return [outline for *_, outline in heapq.nsmallest(_MOST, found)]

    def _ring(self, plans: Iterable[tuple[Cuts, Ranks]], microbatches: int, depths: Depths) -> CandidateSet:
        found = tuple(dict.fromkeys(plans))
        return CandidateSet(found, microbatches, self._depths(len(found[0][1]), microbatches, depths))

    def _depths(self, stages: int, microbatches: int, depths: Depths) -> tuple[Depths, ...]:
        if not self._is_open:
            return ((microbatches,) * stages,)
        policies = [[rise * (stages - 1 - s) + 1 for s in range(stages)] for rise in _RISES] + [[microbatches] * stages]
        lowered = [[min(d, most) for d in found] for found in policies for most in range(1, microbatches + 1)]
        found = [lower(depths) for depths in lowered for lower in (never_growing, falling)]
        if depths:
            found += _changed(depths)
        return tuple(dict.fromkeys(tuple(min(d, microbatches) for d in depths) for depths in found))

    def _counts(self, shape: Shape, count: int) -> list[int]:
        """Return other numbers of micro-batches."""
        if self._problem.constraints.microbatches is not None:
            return []
        found = microbatch_counts(self._problem, stages=len(shape), replicas=max(shape))
        near = {near for near in (count - 1, count + 1) if 1 <= near <= found[-1]}
        return sorted({*found, *near} - {count})

    def _layouts(self, ranks: Ranks) -> dict[Shape, list[Ranks]]:
        """Return layouts that differ by one move; of few devices, all with as many replicas on each stage as these."""
        if self._problem.constraints.replicas is not None:
            return {}
        near = [one for one in layouts_near(ranks, self._problem.cluster) if len(one) <= len(self._positions) + 1]
        shapes = dict.fromkeys(map(shape_of, (ranks, *near)))
        return {shape: [one for one in self._groupings or near if shape_of(one) == shape] for shape in shapes}

    def _moved(self, cuts: Cuts) -> list[Cuts]:
        """Return these cuts, and those with one moved a little; where cuts are few, all as many."""
        if math.comb(len(self._positions), len(cuts)) <= _FEW_CUTS:
            return [cuts, *itertools.combinations(self._positions, len(cuts))]
        moved = [
            (*cuts[:k], position, *cuts[k + 1 :])
            for k, cut in enumerate(cuts)
            for position in nearby(self._positions, cut, count=_STEPS)
        ]
        return [cuts, *(one for one in moved if all(a < b for a, b in itertools.pairwise(one)))]

    def _recut(self, cuts: Cuts, stages: int) -> list[Cuts]:
        """Return cuts for so many stages, at most one more or less."""
        if stages == len(cuts) + 1:
            return self._moved(cuts)
        if stages <= len(cuts):
            return [*itertools.combinations(cuts, stages - 1)]
        return [tuple(sorted((*cuts, position))) for position in self._positions if position not in cuts]


def shape_of(ranks: Ranks) -> Shape:
    """Return the number of replicas of each stage."""
    return tuple(map(len, ranks))


def _changed(depths: Depths) -> Iterator[Depths]:
    """Yield depths with those of neighbouring stages one more or less, as far as they never grow."""
    yield depths
    for s, t in itertools.combinations(range(len(depths) + 1), 2):
        for change in (1, -1):
            yield never_growing([max(1, d + change) if s <= k < t else d for k, d in enumerate(depths)])
