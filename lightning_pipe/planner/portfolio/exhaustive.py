"""Exhaustive planner: every cut, grouping of devices, number of micro-batches and warm-up depth.

The truth for small problems, by the simulator: a plan is judged unless a bound proves that it is not better than the
best that was judged before (`lower_bounds`). Bounds are seldom below the truth, so few plans are judged. What is
tried, and no more:

    samples       if a batch has more than 16, those numbers of micro-batches that other planners try
    depths        never growing along the stages, up to some more than hide messages as long as a compute
    memory        everything saved is kept

O(2^nodes x groupings x depths), so refused above a number of plans.

Legend: s stages.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np

from lightning_pipe.errors import PlanError
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.candidates.cut_points import cuttable
from lightning_pipe.planner.candidates.moves import Ranks, groupings
from lightning_pipe.planner.estimates.bound_terms import Cuts, Parts
from lightning_pipe.planner.estimates.lower_bounds import CandidateBatch, Depths
from lightning_pipe.planner.estimates.recurrence import Estimator, microbatch_counts
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.problem import Problem

MOST_OUTLINES = 200_000
FEW_SAMPLES = 16  # of a batch, for which all numbers of micro-batches are tried
ROUNDING = 1e-9  # share of a step by which the sums of bound and simulator may differ
Plans: TypeAlias = list[tuple[Cuts, Ranks]]


def exhaustive(problem: Problem) -> list[Judged]:
    """Return the best plan of all that fit into memory, or the one that misses it by least.

    Raises:
        PlanError: if there are too many plans to try them all.
    """
    search = _Search(problem)
    tried = [(field, depths) for field, choices in _fields(problem, search.parts) for depths in choices]
    for field, depths in tried:
        search.judge_quicker(field, depths)
    if search.best is None:
        for field, depths in tried:
            search.judge_smaller(field, depths)
    assert search.best is not None, "one stage on all ranks is always possible"
    return [search.best]


class _Search:
    """The best plan so far.

    Attributes:
        parts: prices of the problem, as the judge says.
        best: what ranks first of all that was judged and kept to memory; in `judge_smaller`, of all.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self._judge = problem, Judge(problem)
        self.parts = Parts(problem, self._judge.pricer)
        self.best: Judged | None = None

    def judge_quicker(self, field: CandidateBatch, depths: Depths) -> None:
        """Judge those plans of a field that may fit, and may be quicker than the best."""
        fitting = np.flatnonzero(field.lacking(depths) <= 0)
        if not fitting.size:
            return
        seconds = field.seconds(depths)
        for i in fitting[np.argsort(seconds[fitting], kind="stable")]:
            if self.best is not None and seconds[i] >= self.best.rank(self._problem.cluster)[1] * (1 - ROUNDING):
                return
            judged = self._judged(field, int(i), depths)
            if judged.overflow(self._problem.cluster) <= 0:
                self._keep(judged)

    def judge_smaller(self, field: CandidateBatch, depths: Depths) -> None:
        """Judge those plans of a field that may exceed memory by less than the best."""
        lacking = field.lacking(depths)
        for i in np.argsort(lacking, kind="stable"):
            if self.best is not None and lacking[i] >= self.best.overflow(self._problem.cluster):
                return
            self._keep(self._judged(field, int(i), depths))

    def _judged(self, field: CandidateBatch, i: int, depths: Depths) -> Judged:
        cuts, ranks = field.plans[i]
        return self._judge.judge(Candidate(cuts, ranks, field.microbatches, depths).plan(self._problem))

    def _keep(self, judged: Judged) -> None:
        cluster = self._problem.cluster
        if self.best is None or judged.rank(cluster) < self.best.rank(cluster):
            self.best = judged


def _fields(problem: Problem, parts: Parts) -> Iterator[tuple[CandidateBatch, list[Depths]]]:
    """Yield all plans, with the depths to try."""
    constraints = problem.constraints
    is_open = problem.training and constraints.warmup is None and constraints.schedule != "gpipe"
    estimator = None if is_open else Estimator(StageCostTable(problem, cuttable(problem.graph, sliced=True)))
    for count, plans in _groups(problem):
        if estimator is None:
            yield CandidateBatch(parts, plans, count), [*_all_depths(len(plans[0][1]), count)]
            continue
        wished: dict[Depths, Plans] = defaultdict(list)
        for cuts, ranks in plans:
            row, most = estimator.row(cuts, ranks, count), [count] * len(ranks)
            wished[next(estimator.depth_choices(row, most=most, microbatches=count))].append((cuts, ranks))
        yield from ((CandidateBatch(parts, alike, count), [depths]) for depths, alike in wished.items())


def _groups(problem: Problem) -> Iterator[tuple[int, Plans]]:
    """Yield all plans but for their depths, by number of micro-batches and replicas of each stage."""
    positions = cuttable(problem.graph, sliced=True)
    asked = [(ranks, _counts(problem, stages=len(ranks), replicas=max(map(len, ranks)))) for ranks in _layouts(problem)]
    tried = sum(len(counts) * math.comb(len(positions), len(ranks) - 1) for ranks, counts in asked)
    if tried > MOST_OUTLINES:
        raise PlanError(
            f"planner='exhaustive' would try {tried} plans, and tries {MOST_OUTLINES} at most: {len(positions) + 1} "
            f"operations on {problem.cluster.ranks} devices. Use planner='auto', or a smaller model and fewer devices."
        )
    groups: dict[tuple[int, tuple[int, ...]], Plans] = defaultdict(list)
    for ranks, counts in asked:
        for count in counts:
            cuts = itertools.combinations(positions, len(ranks) - 1)
            groups[count, tuple(map(len, ranks))] += ((one, ranks) for one in cuts)
    yield from ((count, plans) for (count, _), plans in groups.items() if plans)


def _counts(problem: Problem, *, stages: int, replicas: int) -> list[int]:
    """Return all numbers of micro-batches, where samples are few."""
    found = microbatch_counts(problem, stages=stages, replicas=replicas)
    few = problem.constraints.microbatches is None and problem.samples <= FEW_SAMPLES
    return list(range(1, found[-1] + 1)) if few else found


def _layouts(problem: Problem) -> list[Ranks]:
    wished = problem.constraints.replicas
    found = groupings(range(problem.cluster.ranks))
    return [ranks for ranks in found if wished is None or tuple(map(len, ranks)) == wished]


def _all_depths(stages: int, microbatches: int) -> Iterator[Depths]:
    """Yield all depths that never grow, up to some more than hide messages as long as a compute."""
    most = [min(microbatches, 2 * (stages - s) + 4) for s in range(stages)]
    for depths in itertools.product(*(range(m, 0, -1) for m in most)):
        if all(a >= b for a, b in itertools.pairwise(depths)):
            yield depths
