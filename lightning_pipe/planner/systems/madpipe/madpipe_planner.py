"""MadPipe planner: the straight pipeline of least period within memory, by dynamic programming.

Beaumont, Eyraud-Dubois and Shilova, MadPipe: Memory Aware Dynamic Programming Algorithm for Pipelined Model Parallelism
(ScaDL at IPDPS 2022). Stages along the row of `device_order`, one per processor, 1F1B* with the least micro-batches
in flight that sustain the period: `planner.systems.madpipe.madpipe_contiguous`, exact for contiguous stages; costs:
`planner.systems.madpipe.madpipe_chain`.

Not of the paper: processors may be groups of r equal replicas, for every divisor r of the ranks; the number of
micro-batches is one of few per stage. A period says nothing of filling and draining the pipeline nor of summing
gradients once per batch, so the best pipelines of each (r, micro-batches) are compared by the estimated seconds of a
batch. Since warm-up deeper than 1F1B* fills better, each is also proposed with the depths that estimates like best.

Allocations that are not contiguous (`madpipe_special`) are not proposed. A plan can say them, but their gain
lies in the order of `madpipe_periodic`; 1F1B merged in unit time (`merge`) runs them 1.3 to 1.9 times
as slowly as the contiguous pipeline on published profiles of ResNet-50 and Inception-v3, at any depths that were tried.

O(divisors counts log(1/precision)) dynamic programs of O(bounds^2) to O(processors bounds^2), over few bounds at first.

Legend: r replicas per processor, a, b bounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.candidates.cut_points import around, cuttable, worthwhile
from lightning_pipe.planner.candidates.device_order import device_order
from lightning_pipe.planner.estimates.recurrence import Estimator, microbatch_counts, row_s
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.systems.madpipe.madpipe_chain import chain_of
from lightning_pipe.planner.systems.madpipe.madpipe_contiguous import PeriodicPipeline, best_pipeline, least_exceeding

_COARSE = 144  # positions over which everything is compared
_FINE = 256  # positions around the cuts of the best
_ROUGH, _PRECISE = 1e-2, 1e-4  # relative errors of periods
_MOST_STAGES = 64
_PER_STAGE = (1, 2, 4, 8, 16)  # micro-batches per stage that are tried
_COUNTS_KEPT = 2  # of them, for each r
_REFINED = 3  # pipelines that are improved at finer positions
_MOST_OUTLINES = 8


@dataclass(frozen=True)
class _Candidate:
    """A pipeline on groups of ranks, with the estimated seconds of a batch."""

    seconds: float
    groups: tuple[tuple[int, ...], ...]
    microbatches: int
    outline: Candidate


def madpipe(problem: Problem) -> list[Candidate]:
    """Return pipelines of equal groups with the least periods within memory, best first by their estimated seconds.

    Args:
        problem: what is planned.
    """
    search = _Search(problem)
    found = sorted(search.candidates(), key=lambda c: c.seconds) or [search.least_bad()]
    refined = sorted((better for c in found[:_REFINED] for better in search.refined(c)), key=lambda c: c.seconds)
    outlines = (c.outline for c in (*refined, *found[_REFINED:]))
    return list(dict.fromkeys(outlines))[:_MOST_OUTLINES]


class _Search:
    """Pipelines of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._order = problem, device_order(problem.cluster)
        self._positions = {sliced: worthwhile(problem, sliced=sliced, most=_COARSE) for sliced in (False, True)}
        self._estimators: dict[tuple[int, ...], Estimator] = {}

    def candidates(self) -> Iterator[_Candidate]:
        """Yield the best pipelines within memory for all groups, with their best numbers of micro-batches."""
        for groups in self._groupings():
            estimator = self._estimator(self._positions[_is_sliced(groups)])
            found = []
            for count in self._counts(groups):
                pipeline = best_pipeline(chain_of(estimator, groups, count), precision=_ROUGH)
                if pipeline is not None:
                    found.append(_candidate(estimator, pipeline, groups, count))
            yield from sorted(found, key=lambda c: c.seconds)[:_COUNTS_KEPT]

    def least_bad(self) -> _Candidate:
        """Return the pipeline that exceeds memory least, of those with the most micro-batches."""
        found = []
        for groups in self._groupings():
            estimator, count = self._estimator(self._positions[_is_sliced(groups)]), max(self._counts(groups))
            chain = chain_of(estimator, groups, count)
            pipeline = least_exceeding(chain)
            found.append((pipeline.excess(chain), _candidate(estimator, pipeline, groups, count)))
        return min(found, key=lambda pair: pair[0])[1]

    def refined(self, candidate: _Candidate) -> Iterator[_Candidate]:
        """Yield the candidate with cuts at finer positions, with its own depths and with those estimated best."""
        groups, count = candidate.groups, candidate.microbatches
        estimator = self._estimator(self._around(candidate))
        chain = chain_of(estimator, groups, count)
        pipeline = best_pipeline(chain, precision=_PRECISE)
        better = _candidate(estimator, pipeline, groups, count) if pipeline else candidate
        if better.seconds > candidate.seconds:
            better = candidate
        yield better
        outline, seconds, _ = estimator.outline(better.outline.cuts, groups, count)
        cuts = np.searchsorted(estimator.segments.bounds, outline.cuts).tolist()
        if chain.fits(cuts, outline.depths):
            yield replace(better, seconds=seconds, outline=outline)

    def _groupings(self) -> Iterator[tuple[tuple[int, ...], ...]]:
        """Yield neighbours in groups of r, for all r that give stages enough nodes and replicas enough samples."""
        ranks, constraints = len(self._order), self._problem.constraints
        most = self._problem.samples // (constraints.least_samples * (constraints.microbatches or 1))
        is_first = True  # the smallest possible r is taken even if samples are too few
        for r in (r for r in range(1, ranks + 1) if ranks % r == 0):
            groups = tuple(self._order[first : first + r] for first in range(0, ranks, r))
            if len(groups) > min(_MOST_STAGES, len(self._positions[_is_sliced(groups)]) + 1):
                continue
            if is_first or r <= most:
                yield groups
            is_first = False

    def _counts(self, groups: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the numbers of micro-batches to try."""
        possible = microbatch_counts(self._problem, stages=len(groups), replicas=len(groups[0]))
        return sorted({min(possible, key=lambda c: abs(c - len(groups) * each)) for each in _PER_STAGE})

    def _around(self, candidate: _Candidate) -> list[int]:
        """Return the positions near the cuts of a candidate, and the cuts."""
        positions = cuttable(self._problem.graph, sliced=_is_sliced(candidate.groups))
        return around(positions, candidate.outline.cuts, most=_FINE)

    def _estimator(self, positions: Sequence[int]) -> Estimator:
        key = tuple(positions)
        if key not in self._estimators:
            self._estimators[key] = Estimator(StageCostTable(self._problem, key))
        return self._estimators[key]


def _is_sliced(groups: Sequence[tuple[int, ...]]) -> bool:
    """Return whether replicas may exchange slices of micro-batches, as they do where groups weigh them differently."""
    return len(groups[0]) > 1


def _candidate(
    estimator: Estimator, pipeline: PeriodicPipeline, groups: tuple[tuple[int, ...], ...], microbatches: int
) -> _Candidate:
    cuts = tuple(int(estimator.segments.bounds[b]) for b in pipeline.cuts)
    row = estimator.row(cuts, groups, microbatches)
    made_anew = zip(row.backward, pipeline.dropped, row.forward, strict=True)
    row = replace(row, backward=tuple(backward + share * forward for backward, share, forward in made_anew))
    seconds = row_s(row, depths=pipeline.held, microbatches=microbatches)
    return _Candidate(seconds, groups, microbatches, Candidate(cuts, groups, microbatches, pipeline.held))
