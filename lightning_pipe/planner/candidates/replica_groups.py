"""Replica groups of equal size: neighbors in rank order, in any number that divides all devices."""

from __future__ import annotations

from lightning_pipe.planner.candidates.moves import Ranks
from lightning_pipe.planner.problem import Problem

MOST_STAGES = 128


def equal_groups(problem: Problem, units: int) -> list[Ranks]:
    """Return the groups for every number of equal stages, most stages first; replicas that lack samples are left out.

    Args:
        problem: devices, samples of a batch, and constraints.
        units: parts of the graph, so that no more stages are possible; one stage always is.
    """
    ranks, most = problem.cluster.ranks, max(1, problem.samples // problem.constraints.least_samples)
    possible = [size for size in range(1, ranks + 1) if ranks % size == 0 and ranks // size <= min(units, MOST_STAGES)]
    sizes = [size for size in possible if size <= most] or possible[:1]
    return [tuple(tuple(range(r, r + size)) for r in range(0, ranks, size)) for size in sizes]
