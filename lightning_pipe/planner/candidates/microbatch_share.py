"""Numbers of micro-batches of a step whose training depends on them: decided by samples and ranks, never by times.

With batch statistics the share of a batch that a micro-batch has is part of what is trained. So it is the share that
data parallel training (DDP) gives a rank, but for small batches, whose statistics would be of too few samples; and
smaller only where nothing else fits into memory, or is a schedule.
"""

from __future__ import annotations

from lightning_pipe.planner.problem import Problem

LEAST_SHARE = 16  # samples of a micro-batch below which no plan goes by itself


def shared_counts(problem: Problem) -> tuple[int, ...]:
    """Return the numbers of micro-batches to plan with, in the order of trial; () where any number trains the same."""
    constraints = problem.constraints
    if not problem.graph.by_microbatch or constraints.microbatches is not None or constraints.order:
        return ()
    replicas = max(constraints.replicas or (1,))  # which the user gives whole micro-batches in turn
    counts = [min(problem.samples, max(replicas, count_by_share(problem.samples, ranks=problem.cluster.ranks)))]
    while 2 * counts[-1] <= problem.samples:
        counts.append(2 * counts[-1])
    return tuple(counts)


def count_by_share(samples: int, *, ranks: int) -> int:
    """Return how many micro-batches have DDP's share of a batch each, and no less than the least."""
    return min(ranks, max(1, samples // LEAST_SHARE))
