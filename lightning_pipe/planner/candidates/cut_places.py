"""Places at which a graph can be cut, in words: how many there are, and why the others are none."""

from __future__ import annotations

from lightning_pipe.core.graph import Graph
from lightning_pipe.errors import FewPlacesError
from lightning_pipe.planner.candidates.cut_points import cuttable

_MOST_REASONS = 3


def too_few_places(graph: Graph, *, stages: int, sliced: bool, advice: str) -> FewPlacesError:
    """Return the error that there are too few places to cut.

    Args:
        graph: what is to be cut.
        stages: number of stages that are wanted.
        sliced: whether stages with different numbers of replicas may meet anywhere.
        advice: what to do.
    """
    count = len(graph.nodes)
    inside = range(1, count)
    crossed: dict[str, list[int]] = {}
    for position in (position for position in inside if position in graph.uncuttable):
        crossed.setdefault(graph.uncuttable[position], []).append(position)
    rows = [p for p in inside if sliced and p in graph.unsliceable and p not in graph.uncuttable]
    usable = len(cuttable(graph, sliced=sliced))
    most = sorted(crossed.items(), key=lambda found: -len(found[1]))
    reasons = [f"{_counted(places)} since {what}" for what, places in most[:_MOST_REASONS]]
    if others := sum(len(places) for _, places in most[_MOST_REASONS:]):
        reasons.append(f"{others} for {len(most) - _MOST_REASONS} other values like these")
    if rows:
        reasons.append(
            f"{_counted(rows)} since a value crosses whose samples do not lie in rows (from {_named(graph, rows)})"
        )
    why = "".join(f"; {reason}" for reason in reasons)
    return FewPlacesError(
        f"The step has {count} operation{'s' * (count != 1)} and can be cut at {usable} "
        f"place{'s' * (usable != 1)} between them, too few for {stages} stages{why}. {advice}"
    )


def _counted(places: list[int]) -> str:
    return f"{len(places)} {'is' if len(places) == 1 else 'are'} none"


def _named(graph: Graph, places: list[int]) -> str:
    """Name the operations around the first and the last of some places."""
    first, last = graph.nodes[places[0] - 1], graph.nodes[places[-1]]
    return " to ".join(f"{node.module or node.name}{f' at {node.line}' if node.line else ''}" for node in (first, last))
