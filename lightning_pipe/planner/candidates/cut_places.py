"""Places at which a graph can be cut, in words: how many there are, and why the others are none."""

from __future__ import annotations

from lightning_pipe.core.graph import Graph
from lightning_pipe.errors import PlanError


def too_few_places(graph: Graph, *, stages: int, sliced: bool, advice: str) -> PlanError:
    """Return the error that there are too few places to cut.

    Args:
        graph: what is to be cut.
        stages: number of stages that are wanted.
        sliced: whether stages with different numbers of replicas may meet anywhere.
        advice: what to do.
    """
    count = len(graph.nodes)
    inside = range(1, count)
    state = [position for position in inside if position in graph.uncuttable]
    rows = [p for p in inside if sliced and p in graph.unsliceable and p not in graph.uncuttable]
    usable = max(0, count - 1) - len(state) - len(rows)
    reasons = [
        (state, "stand between a read of state and the operation that changes it, or in values that cannot travel"),
        (rows, "are crossed by a value whose samples do not lie in rows of their own"),
    ]
    why = "".join(f"; {len(places)} {what} (from {_named(graph, places)})" for places, what in reasons if places)
    return PlanError(
        f"The step has {count} operation{'s' * (count != 1)} and can be cut at {usable} "
        f"place{'s' * (usable != 1)} between them, too few for {stages} stages{why}. {advice}"
    )


def _named(graph: Graph, places: list[int]) -> str:
    """Name the operations around the first and the last of some places."""
    first, last = graph.nodes[places[0] - 1], graph.nodes[places[-1]]
    return " to ".join(f"{node.module or node.name}{f' at {node.line}' if node.line else ''}" for node in (first, last))
