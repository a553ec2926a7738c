"""Which cuts give every rank the same work? The plain planner: stages in the order of the ranks, as many as asked for.

Candidates are few: for several prices of traffic the cuts that minimise the slowest stage, by dynamic programming over
the cheapest cut positions (the partition problem of PipeDream without replication, SOSP'19 section 3.1), each with
several numbers of micro-batches. The simulator judges them; the fastest that fits into memory wins.

Cost of a stage: its forward and backward seconds divided by replicas and speed, plus a multiple of the seconds of the
messages at its ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.program import Options
from lightning_pipe.cost.stage import position_seconds
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.cuts import crossing_bytes, worthwhile
from lightning_pipe.planner.judge import Judge, Judged
from lightning_pipe.planner.outline import stage_plans
from lightning_pipe.planner.problem import Problem

_TRAFFIC_PRICES = (0.0, 1.0, 3.0)  # messages hidden behind computes, exposed, and exposed on a busy link
_PER_STAGE = (1, 2, 4, 8)  # micro-batches per stage that are tried


def uniform(
    problem: Problem,
    *,
    replicas: Sequence[int],
    microbatches: int | None = None,
    schedule: str = "1f1b",
    options: Options | None = None,
) -> Plan:
    """Cut the graph into `len(replicas)` stages of equal work; stage s takes the next `replicas[s]` ranks.

    Args:
        problem: graph, costs and devices.
        replicas: ranks per stage.
        microbatches: micro-batches per batch; None lets the simulator choose among some per stage.

    Raises:
        PlanError: if the graph has fewer nodes than stages are wanted.
    """
    return candidates(problem, replicas=replicas, microbatches=microbatches, schedule=schedule, options=options)[0].plan


def candidates(
    problem: Problem,
    *,
    replicas: Sequence[int],
    microbatches: int | None = None,
    schedule: str = "1f1b",
    options: Options | None = None,
) -> list[Judged]:
    """Return all candidates, the best first: those that fit into memory by their time, then the others by overflow.

    Raises:
        PlanError: if the graph has fewer nodes than stages are wanted.
    """
    stages, samples = len(replicas), problem.samples
    positions = worthwhile(problem, sliced=len(set(replicas)) > 1)
    if len(positions) < stages - 1:
        raise PlanError(
            f"The step has {len(problem.graph.nodes)} operations, too few for {stages} stages. Use fewer devices, or "
            "replicate stages by `layout`."
        )
    counts = [microbatches] if microbatches is not None else sorted({*_counts(stages, samples)})
    judge = Judge(problem)
    plans = [
        Plan(_stage_plans(problem, cuts, replicas), count, schedule, dict(options or {}), problem.graph.fingerprint)
        for cuts in _cut_candidates(problem, positions, replicas, max(1, samples // max(counts)))
        for count in counts
    ]
    judged = [judge.judge(plan) for plan in plans]
    return sorted(judged, key=lambda j: (max(0, j.overflow(problem.cluster)), j.step_s))


def _counts(stages: int, samples: int) -> Iterator[int]:
    return (min(samples, n * stages if stages > 1 else 1) for n in _PER_STAGE)


def _cut_candidates(
    problem: Problem, positions: list[int], replicas: Sequence[int], samples: int
) -> list[tuple[int, ...]]:
    found = (_balanced(problem, positions, replicas, samples, traffic) for traffic in _TRAFFIC_PRICES)
    return list(dict.fromkeys(found))


def _stage_plans(problem: Problem, cuts: tuple[int, ...], replicas: Sequence[int]) -> tuple[StagePlan, ...]:
    firsts = itertools.accumulate(replicas, initial=0)
    ranks = tuple(tuple(range(first, first + count)) for first, count in zip(firsts, replicas, strict=False))
    return stage_plans(problem, cuts, ranks)


def _costs(problem: Problem, samples: int) -> list[float]:
    return [forward + backward for forward, backward in position_seconds(problem.graph, problem.profile, samples)]


def _balanced(
    problem: Problem, positions: list[int], replicas: Sequence[int], samples: int, traffic: float
) -> tuple[int, ...]:
    """Minimise the seconds of the slowest stage over these positions, messages priced `traffic`-fold.

    Args:
        samples: samples of a micro-batch.
    """
    graph, cluster = problem.graph, problem.cluster
    bounds = np.array([0, *positions, len(graph.nodes)])
    prefix = np.array([0.0, *itertools.accumulate(_costs(problem, samples))])[bounds]
    crossing = np.array(crossing_bytes(graph, samples), dtype=float)[bounds]
    ranks = [0, *itertools.accumulate(replicas)]

    def message_s(boundary: int) -> NDArray[np.float64]:
        """Return the seconds, there and back, of what crosses at every bound if stage `boundary` ends there."""
        if not 0 <= boundary < len(replicas) - 1:
            return np.zeros(len(bounds))
        link = cluster.link(ranks[boundary + 1] - 1, ranks[boundary + 1])
        seconds: NDArray[np.float64] = traffic * (2 * link.latency_s + crossing / link.bytes_per_s)
        return seconds

    def cost(stage: int) -> NDArray[np.float64]:
        """Return the seconds of a stage from bound a (row) to bound b (column)."""
        speed = min(cluster.device(rank).speed for rank in range(ranks[stage], ranks[stage + 1])) * replicas[stage]
        work = (prefix[None, :] - prefix[:, None]) / speed
        seconds = work + message_s(stage - 1)[:, None] + message_s(stage)[None, :]
        rising = np.arange(len(bounds))[:, None] < np.arange(len(bounds))[None, :]
        return np.where(rising, seconds, np.inf)

    best = cost(0)[0]
    choices = []
    for stage in range(1, len(replicas)):
        slowest = np.maximum(best[:, None], cost(stage))
        choices.append(slowest.argmin(axis=0))
        best = slowest.min(axis=0)
    cuts, b = [], len(bounds) - 1
    for choice in reversed(choices):
        b = int(choice[b])
        cuts.append(int(bounds[b]))
    return tuple(reversed(cuts))
