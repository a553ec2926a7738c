"""Add an operation to a traced graph, with all that is known of the others: its value, its place, its line.

Its `meta` says that it was inserted: what it does with the number of samples is meant so.
"""

from __future__ import annotations

from typing import Any

from torch import fx


def insert(before: fx.Node, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Insert a call before a node and return it.

    Args:
        before: the node.
        target: what is called.
        args: its arguments, with nodes for values.
        like: node whose line, module and place in forward or backward it has; by default `before`.
        kwargs: its other arguments.
    """
    graph, like = before.graph, before if like is None else like
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    known = ("custom", "seq_nr", "partitioner_tag", "stack_trace")
    node.meta = {key: like.meta[key] for key in known if key in like.meta}
    node.meta["inserted"] = True
    node.meta["val"] = target(
        *fx.map_arg(args, lambda n: n.meta["val"]),
        **fx.map_arg(kwargs, lambda n: n.meta["val"]),
    )
    return node
