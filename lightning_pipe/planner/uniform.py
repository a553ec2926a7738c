"""Which cuts give every rank the same work? The planner of last resort: counted costs, one rank per stage.

Cost of a node: the time its operations and its memory traffic take on a nominal device of `_FLOPS_PER_BYTE`. Stage s
with r replicas has 1/r of its cost. The slowest stage is minimised, its transfers at `_LINK_FACTOR` times the price of
memory traffic included, by dynamic programming over the cheapest cut positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import Plan, Share, StagePlan
from lightning_pipe.errors import PlanError

_FLOPS_PER_BYTE = 10.0  # balance of a nominal device; present CPUs have 5-20, GPUs about 100
_LINK_FACTOR = 10.0  # a link is this many times slower than memory
_MOST_POSITIONS = 400
_MICROBATCHES_PER_STAGE = 4


def uniform(
    graph: Graph,
    *,
    replicas: Sequence[int],
    samples: int,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    options: dict[str, int | str] | None = None,
) -> Plan:
    """Cut the graph into `len(replicas)` stages of equal work; stage s takes the next `replicas[s]` ranks.

    Args:
        samples: samples of a batch.
        microbatches: micro-batches per batch; None chooses four per stage (one for a single stage), or as many as
            there are samples.

    Raises:
        PlanError: if the graph has fewer nodes than stages are wanted.
    """
    stages = len(replicas)
    positions = _worthwhile_positions(graph, sliced=len(set(replicas)) > 1)
    if len(positions) < stages - 1:
        raise PlanError(
            f"The step has {len(graph.nodes)} operations, too few for {stages} stages. Use fewer devices, or replicate "
            "stages by `layout`."
        )
    cuts = _balanced(graph, positions, replicas)
    if microbatches is None:
        microbatches = min(samples, _MICROBATCHES_PER_STAGE * stages if stages > 1 else 1)
    first = 0
    planned = []
    for s, (begin, end) in enumerate(itertools.pairwise((0, *cuts, len(graph.nodes)))):
        names = {node.name for node in graph.nodes[begin:end]}
        share: Share = "microbatches" if replicas[s] > 1 and names & set(graph.coupled) else "samples"
        ranks = tuple(range(first, first + replicas[s]))
        planned.append(StagePlan(graph.nodes[begin].name if s else "", ranks, share))
        first += replicas[s]
    return Plan(tuple(planned), microbatches, schedule, dict(options or {}), graph.fingerprint)


def crossing_bytes(graph: Graph) -> list[int]:
    """Return, per cut position, the bytes of forward values produced before it and used after it."""
    position = {node.name: k for k, node in enumerate(graph.nodes)}
    last_use: dict[str, int] = {}
    for k, node in enumerate(graph.nodes):
        for name in node.inputs:
            last_use[name] = k
    change = [0] * (len(graph.nodes) + 1)
    for name, end in last_use.items():
        if name in position:
            change[position[name] + 1] += graph.nodes[position[name]].output_bytes
            change[end + 1] -= graph.nodes[position[name]].output_bytes
    return list(itertools.accumulate(change))


def _costs(graph: Graph) -> list[float]:
    return [(n.flops + n.backward_flops) / _FLOPS_PER_BYTE + n.touched_bytes for n in graph.nodes]


def _worthwhile_positions(graph: Graph, *, sliced: bool) -> list[int]:
    """Return the positions with the least traffic, one per slice of the work, in order.

    Args:
        graph: the graph to be cut.
        sliced: whether stages have different numbers of replicas, so that what crosses must be sliceable.
    """
    forbidden = graph.uncuttable | (graph.unsliceable if sliced else frozenset())
    crossing, costs = crossing_bytes(graph), _costs(graph)
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


def _balanced(graph: Graph, positions: list[int], replicas: Sequence[int]) -> tuple[int, ...]:
    """Minimise the cost of the slowest stage over these positions."""
    crossing = [_LINK_FACTOR * b for b in crossing_bytes(graph)]
    prefix = [0.0, *itertools.accumulate(_costs(graph))]
    bounds = [0, *positions, len(graph.nodes)]
    last = len(bounds) - 1

    def cost(a: int, b: int, stage: int) -> float:
        i, j = bounds[a], bounds[b]
        return (prefix[j] - prefix[i] + crossing[i] + crossing[j]) / replicas[stage]

    best: list[float] = [cost(0, b, 0) if b else float("inf") for b in range(last + 1)]
    choices: list[list[int]] = []
    for stage in range(1, len(replicas)):
        options = [
            min(((max(best[a], cost(a, b, stage)), a) for a in range(stage, b)), default=(float("inf"), 0))
            for b in range(last + 1)
        ]
        best = [value for value, _ in options]
        choices.append([a for _, a in options])
    cuts, b = [], last
    for choice in reversed(choices):
        b = choice[b]
        cuts.append(bounds[b])
    return tuple(reversed(cuts))
