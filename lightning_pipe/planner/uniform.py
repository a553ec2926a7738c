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

from lightning_pipe.core.graph import Graph, Tensor
from lightning_pipe.core.plan import Plan, Share, StagePlan
from lightning_pipe.core.program import Options
from lightning_pipe.cost.stage import position_seconds
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.judge import Judge, Judged
from lightning_pipe.planner.problem import Problem

_TRAFFIC_PRICES = (0.0, 1.0, 3.0)  # messages hidden behind computes, exposed, and exposed on a busy link
_MOST_POSITIONS = 400
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
    positions = _worthwhile_positions(problem, sliced=len(set(replicas)) > 1)
    if len(positions) < stages - 1:
        raise PlanError(
            f"The step has {len(problem.graph.nodes)} operations, too few for {stages} stages. Use fewer devices, or "
            "replicate stages by `layout`."
        )
    counts = [microbatches] if microbatches is not None else sorted({*_counts(stages, samples)})
    judge = Judge(problem)
    plans = [
        Plan(
            _stage_plans(problem.graph, cuts, replicas), count, schedule, dict(options or {}), problem.graph.fingerprint
        )
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


def _stage_plans(graph: Graph, cuts: tuple[int, ...], replicas: Sequence[int]) -> tuple[StagePlan, ...]:
    first, planned = 0, []
    for s, (begin, end) in enumerate(itertools.pairwise((0, *cuts, len(graph.nodes)))):
        names = {node.name for node in graph.nodes[begin:end]}
        share: Share = "microbatches" if replicas[s] > 1 and names & set(graph.coupled) else "samples"
        ranks = tuple(range(first, first + replicas[s]))
        planned.append(StagePlan(graph.nodes[begin].name if s else "", ranks, share))
        first += replicas[s]
    return tuple(planned)


def crossing_bytes(graph: Graph, samples: int) -> list[int]:
    """Return, per cut position, the bytes that cross it for a micro-batch: values forward and gradients backward.

    Values that an operation before the position makes and one behind it reads, in forward or backward, and gradients
    the other way round. What is repeated where it is read does not cross, nor do terms of a parameter's gradient.
    """
    change = [0] * (len(graph.nodes) + 1)
    spans = [[_place(graph, tensor)] * 2 for tensor in graph.tensors]
    for operation in graph.operations:
        if operation.phase == "repeated" or operation.adds_terms:
            continue
        for t in operation.reads:
            at = max(0, operation.at)
            spans[t] = [min(spans[t][0], at), max(spans[t][1], at)]
    for tensor, (first, last) in zip(graph.tensors, spans, strict=True):
        if tensor.maker < 0 or graph.operations[tensor.maker].phase != "repeated":
            change[first + 1] += tensor.size(samples)
            change[last + 1] -= tensor.size(samples)
    return list(itertools.accumulate(change))


def _place(graph: Graph, tensor: Tensor) -> int:
    return max(0, graph.operations[tensor.maker].at) if tensor.maker >= 0 else 0


def _costs(problem: Problem, samples: int) -> list[float]:
    return [forward + backward for forward, backward in position_seconds(problem.graph, problem.profile, samples)]


def _worthwhile_positions(problem: Problem, *, sliced: bool) -> list[int]:
    """Return the positions with the least traffic, one per slice of the work, in order.

    Args:
        problem: the graph to be cut, with costs.
        sliced: whether stages have different numbers of replicas, so that what crosses must be sliceable.
    """
    graph = problem.graph
    forbidden = graph.uncuttable | (graph.unsliceable if sliced else frozenset())
    crossing, costs = crossing_bytes(graph, graph.samples), _costs(problem, graph.samples)
    total = sum(costs) or 1.0
    best: dict[int, int] = {}
    done = 0.0
    for position in range(1, len(graph.nodes)):
        done += costs[position - 1]
        if position in forbidden:
            continue
        part = int(done / total * _MOST_POSITIONS)
        if part not in best or crossing[position] < crossing[best[part]]:
            best[part] = position
    return sorted(best.values())


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
