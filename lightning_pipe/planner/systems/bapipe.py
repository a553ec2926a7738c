"""BaPipe planner: explores few partitions, warm-up depths and micro-batch counts, then repairs memory.

After Zhao et al., BaPipe: Exploration of Balanced Pipeline Parallelism for DNN Training (arXiv 2012.12544), of which
the abstract was read: it explores ways to train a pipeline and balanced partitions by the computation, memory and
communication of the devices. The rest is recalled or ours:

    schedules    1F1B; with more warm-up where messages are to be hidden; all forwards first. Here these are depths of
                 1F1B (`planner.estimates.recurrence`), among which the estimate of the whole batch chooses
    partitions   balanced by computation; by computation with messages, once and more than once, so that a cut that
                 messages bind moves to where less crosses; by memory, relative to what each device has
    mending      while a stage exceeds its memory, one of its ends moves by one position towards a neighbour, as long as
                 that lowers what is too much
    devices      straight pipelines in the order of the ranks; ours: also groups of equal replicas as one device each,
                 data parallel training among them

What it returns first is the best of all candidates by the estimate; candidates that a bound (`bound_s`) puts behind
enough others are not estimated.

Growth: O(groups . counts . (stages . positions^2 + mended positions . stages)); fewer counts for many stages.

Legend: s stage, b bounds as in `planner.estimates.stage_costs`, n samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from lightning_pipe.planner.candidates.candidate import Candidate, share_alike
from lightning_pipe.planner.candidates.cut_points import worthwhile
from lightning_pipe.planner.candidates.moves import Ranks
from lightning_pipe.planner.candidates.replica_groups import equal_groups
from lightning_pipe.planner.estimates.balance import TRAFFIC_PRICES, Balancer, least_largest
from lightning_pipe.planner.estimates.recurrence import Estimator, bound_s, microbatch_counts
from lightning_pipe.planner.estimates.stage_costs import Matrix, StageCostTable
from lightning_pipe.planner.problem import Problem

_MOST_OUTLINES = 8
_POSITIONS = ((16, 200), (64, 128))  # for up to so many stages; as many as stages for more
_COUNTS = ((16, 4), (64, 2))  # numbers of micro-batches for which up to so many stages are cut; one for more
_MOST_MENDED = 64  # moves of one partition

Scored = tuple[float, float, Candidate]
"""Bytes above memory, seconds, outline: smaller is better."""


def bapipe(problem: Problem) -> list[Candidate]:
    """Return the best outlines after BaPipe, the best first.

    Args:
        problem: what is planned.
    """
    found = sorted(candidates(problem, wanted=_MOST_OUTLINES), key=lambda candidate: candidate[:2])
    return list(dict.fromkeys(outline for _, _, outline in found))[:_MOST_OUTLINES]


def candidates(problem: Problem, *, wanted: float = math.inf) -> Iterator[Scored]:
    """Yield the outlines that are explored, mended where they exceed memory.

    Args:
        problem: what is planned.
        wanted: how many of the best are wanted; what fits and surely is not among them is left out.
    """
    drafts = [draft for explorer in _explorers(problem) for draft in explorer.drafts()]
    fitting: dict[Candidate, float] = {}
    for bound, explorer, cuts, count in sorted(drafts, key=lambda draft: draft[0]):
        better = sum(seconds < bound for seconds in fitting.values())
        if better >= wanted and explorer.fits(cuts, count):
            continue
        excess, seconds, outline = explorer.candidate(cuts, count)
        if excess <= 0:
            fitting[outline] = seconds
        yield excess, seconds, outline


def _explorers(problem: Problem) -> Iterator[_Explorer]:
    estimators: dict[tuple[int, bool], Estimator] = {}
    for groups in equal_groups(problem, len(problem.graph.nodes)):
        most = next((most for stages, most in _POSITIONS if len(groups) <= stages), 2 * len(groups))
        key = (most, not share_alike(problem, groups))
        if key not in estimators:
            estimators[key] = Estimator(StageCostTable(problem, worthwhile(problem, sliced=key[1], most=most)))
        if estimators[key].segments.units >= len(groups):
            yield _Explorer(estimators[key], groups)


class _Explorer:
    """The candidates of one choice of devices."""

    def __init__(self, estimator: Estimator, groups: Ranks) -> None:
        self._estimator, self._groups = estimator, groups
        self._balancer = Balancer(estimator)
        self._positions = [int(position) for position in estimator.segments.bounds[1:-1]]

    def drafts(self) -> Iterator[tuple[float, _Explorer, tuple[int, ...], int]]:
        """Yield bounds on the seconds, with partitions and numbers of micro-batches."""
        stages = len(self._groups)
        counts = microbatch_counts(self._estimator.problem, stages=stages, replicas=len(self._groups[0]))
        cut = next((most for few, most in _COUNTS if stages <= few), 1)
        partitions = dict.fromkeys(cuts for count in counts[-cut:] for cuts in self._partitions(count))
        for cuts, count in itertools.product(partitions, counts):
            row = self._estimator.row(cuts, self._groups, count)
            yield bound_s(row, microbatches=count), self, cuts, count

    def fits(self, cuts: tuple[int, ...], count: int) -> bool:
        """Return whether there is memory for the least warm-up."""
        rooms = self._estimator.rooms(cuts, self._groups, count)
        return all(room.saved <= room.bytes for room in rooms)

    def candidate(self, cuts: tuple[int, ...], count: int) -> Scored:
        """Return the outline with the best warm-up, mended where it exceeds memory."""
        return self._mended(self._candidate(cuts, count))

    def _candidate(self, cuts: tuple[int, ...], count: int) -> Scored:
        outline, seconds, excess = self._estimator.outline(cuts, self._groups, count)
        return max(0.0, excess), seconds, outline

    def _partitions(self, count: int) -> Iterator[tuple[int, ...]]:
        """Yield balanced partitions; memory is looked at when they are mended."""
        if len(self._groups) == 1:
            yield ()
            return
        for traffic in TRAFFIC_PRICES:
            cuts = self._balancer.cuts(self._groups, count, traffic=traffic)
            if cuts is not None:
                yield cuts
        balanced = least_largest(self._fillings(count))
        if balanced is not None:
            yield tuple(self._positions[b - 1] for b in balanced)

    def _fillings(self, count: int) -> Iterator[Matrix]:
        """Yield the share of its memory that every stage takes with 1F1B's least warm-up, for all pairs of bounds."""
        segments, cluster = self._estimator.segments, self._estimator.problem.cluster
        is_stage = np.triu(np.ones((segments.units + 1, segments.units + 1), dtype=bool), k=1)
        samples = self._estimator.problem.samples / count
        for s, group in enumerate(self._groups):
            n = max(share for share, _ in self._estimator.slices(0, segments.units, group, samples))
            memory = min(cluster.device(rank).memory_bytes for rank in group)
            peak = segments.peak_bytes(n, min(count, len(self._groups) - s))
            yield np.where(is_stage, peak / memory, np.inf)

    def _mended(self, candidate: Scored) -> Scored:
        """Move ends of stages that exceed memory while that helps."""
        for _ in range(_MOST_MENDED):
            excess, _, outline = candidate
            if excess <= 0:
                break
            moved = [self._candidate(cuts, outline.microbatches) for cuts in self._moved(outline)]
            best = min(moved, key=lambda found: found[:2], default=candidate)
            if best[0] >= excess:
                break
            candidate = best
        return candidate

    def _moved(self, outline: Candidate) -> Iterator[tuple[int, ...]]:
        """Yield the partitions in which the fullest stage gives a position to a neighbour."""
        rooms = self._estimator.rooms(outline.cuts, outline.ranks, outline.microbatches)
        missing = [depth * room.saved - room.bytes for depth, room in zip(outline.depths, rooms, strict=True)]
        fullest = int(np.argmax(missing))
        ends = [0, *(self._positions.index(cut) + 1 for cut in outline.cuts), len(self._positions) + 1]
        if ends[fullest + 1] - ends[fullest] < 2:
            return
        for cut, step in ((fullest - 1, 1), (fullest, -1)):  # its first position backwards, its last one forwards
            if 0 <= cut < len(outline.cuts):
                moved = self._positions[ends[cut + 1] - 1 + step]
                yield (*outline.cuts[:cut], moved, *outline.cuts[cut + 1 :])
