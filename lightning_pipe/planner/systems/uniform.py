"""Uniform planner: cuts that give every rank equal work, stages in the order of the ranks.

For several prices of traffic the cuts that minimise the slowest stage (`balance`), each with several numbers of
micro-batches; the quickest by estimate comes first.
"""

from __future__ import annotations

import itertools

from lightning_pipe.planner.candidates.candidate import Candidate, share_alike
from lightning_pipe.planner.candidates.cut_places import too_few_places
from lightning_pipe.planner.candidates.cut_points import worthwhile
from lightning_pipe.planner.estimates.balance import Balancer
from lightning_pipe.planner.estimates.recurrence import Estimator, microbatch_counts
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.problem import Problem

_MOST_OUTLINES = 12


def uniform(problem: Problem) -> list[Candidate]:
    """Cut the graph into stages of equal work: one per rank, or `constraints.replicas`, each on the next ranks.

    Args:
        problem: graph, costs, devices and constraints.

    Raises:
        PlanError: if the graph has too few places to cut.
    """
    replicas = problem.constraints.replicas or (1,) * problem.cluster.ranks
    firsts = itertools.accumulate(replicas, initial=0)
    ranks = tuple(tuple(range(first, first + count)) for first, count in zip(firsts, replicas, strict=False))
    sliced = not share_alike(problem, ranks)
    positions = worthwhile(problem, sliced=sliced)
    if len(positions) < len(replicas) - 1:
        raise too_few_places(
            problem.graph,
            stages=len(replicas),
            sliced=sliced,
            advice="Use fewer devices, or replicate stages by `layout`.",
        )
    estimator = Estimator(StageCostTable(problem, positions))
    balancer = Balancer(estimator)
    found = [
        estimator.outline(cuts, ranks, count)
        for count in microbatch_counts(problem, stages=len(ranks), replicas=max(replicas))
        for cuts in balancer.variants(ranks, count) or ()
    ]
    found.sort(key=lambda one: (max(0.0, one[2]), one[1]))
    return list(dict.fromkeys(outline for outline, _, _ in found))[:_MOST_OUTLINES]
