"""Least memory of any plan: devices that are too small are recognized without a search.

Whatever a plan is, somebody holds every parameter with its gradient and its optimizer state, and while a micro-batch
turns round its stages hold what they save of it, its replicas their shares; what may be recomputed or offloaded counts
as nothing. So

    all plans    state of the whole step + saved bytes of a micro-batch  <=  memory of all devices, less a copy of the
                 buffers each
    rows         of stages that are one part of the graph each: as many as there are devices, each filled up in turn as
                 if it were the largest, hold all of it, but for optimizer state that replicas may share

Where these fail, plans that lack least are looked at instead of the results of a search: every device gets a part that
exceeds its memory as little as the parts of the others exceed theirs (`planner.estimates.balance.least_largest`).

Legend: a, b bounds as in `planner.estimates.stage_costs`, n samples, s stage.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_pipe.planner.candidates.candidate import Candidate, can_meet
from lightning_pipe.planner.candidates.cut_points import cuttable, worthwhile
from lightning_pipe.planner.candidates.moves import Ranks
from lightning_pipe.planner.estimates.balance import least_largest
from lightning_pipe.planner.estimates.recurrence import microbatch_counts
from lightning_pipe.planner.estimates.stage_costs import Matrix, StageCostTable
from lightning_pipe.planner.problem import Problem

_SURE = 0.9  # of the saved bytes of segments, which count the memory behind views less exactly than the judge


class LeastMemory:
    """Lower bounds on the memory of any plan: what can fit at all.

    Args:
        problem: graph, devices and constraints.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        bounds = worthwhile(problem, sliced=False)
        self._segments = self._of_rows = StageCostTable(problem, bounds)
        if problem.constraints.shard_optimizer != "off":
            optimizer = replace(problem.profile.optimizer, state_bytes_per_byte=0.0)
            stateless = replace(problem, profile=replace(problem.profile, optimizer=optimizer))
            self._of_rows = StageCostTable(stateless, bounds)
        self._memories = [problem.cluster.device(rank).memory_bytes for rank in range(problem.cluster.ranks)]
        self._samples = problem.samples // problem.constraints.microbatches if problem.constraints.microbatches else 1

    def may_fit(self) -> bool:
        """Return whether any plan may fit, by what all devices have together."""
        buffers = sum(self._problem.graph.buffer_bytes.values()) * (len(self._memories) - 1)
        return bool(_needed(self._segments, self._samples)[0, -1] + buffers <= sum(self._memories))

    def row_may_fit(self) -> bool:
        """Return whether stages may fit that are one part of the graph each.

        Cuts may be between the bounds that are known; of a stage that begins there, the rest of that unit is left out.
        """
        segments, most = self._of_rows, len(self._memories)
        needed = _needed(segments, max(1, self._samples // most))
        begun = 0 if segments.units > len(cuttable(self._problem.graph, sliced=False)) else 1
        a = 0
        for _ in range(most):
            row = needed[min(a + begun, segments.units) if a else 0]
            b = int(np.searchsorted(np.maximum.accumulate(row), max(self._memories), side="right")) - 1
            if b <= a:
                return False
            if b >= segments.units:
                return True
            a = b
        return False

    def nearest(self) -> list[Candidate]:
        """Return plans whose fullest device lacks little, with the least warm-up and many micro-batches."""
        segments, problem = self._segments, self._problem
        ranks = _ranks(problem, segments.units)
        found = []
        for count in microbatch_counts(problem, stages=len(ranks), replicas=max(map(len, ranks)))[-2:]:
            cuts = least_largest(map(self._lacking, ranks, [problem.samples / count] * len(ranks)))
            positions = tuple(int(segments.bounds[b]) for b in cuts or ())
            if cuts is not None and can_meet(problem, positions, ranks):
                found.append(Candidate(positions, ranks, count, (1,) * len(ranks)))
        return found

    def _lacking(self, group: tuple[int, ...], samples: float) -> Matrix:
        """Return the bytes by which every stage exceeds the memory of the smallest of these ranks."""
        lacking = _needed(self._segments, samples / len(group)) - min(self._memories[rank] for rank in group)
        lacking[np.tril_indices_from(lacking)] = np.inf
        return lacking


def _needed(segments: StageCostTable, samples: float) -> Matrix:
    """Return the bytes that every stage needs at least, with so many samples of a micro-batch."""
    problem = segments.problem
    if problem.constraints.memory_policies or not problem.training:
        return segments.state_bytes
    return segments.state_bytes + _SURE * segments.saved_bytes.all(samples)


def _ranks(problem: Problem, units: int) -> Ranks:
    """Return the wished stages, or as many as there are devices, as far as the graph can be cut."""
    ranks = range(problem.cluster.ranks)
    if problem.constraints.replicas is not None:
        ends = np.cumsum(problem.constraints.replicas).tolist()
        return tuple(
            tuple(ranks[end - size : end]) for end, size in zip(ends, problem.constraints.replicas, strict=True)
        )
    stages = min(units, len(ranks))
    return tuple(tuple(int(r) for r in part) for part in np.array_split(np.array(ranks), stages))
