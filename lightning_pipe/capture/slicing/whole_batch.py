"""Make a joint graph one of the whole batch, in which nothing divides inside by a part of the batch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.operators import WEIGHED_MEANS, Trait, is_random, makes_constant, row_of
from lightning_pipe.capture.torch_private import HeldGraphModule, OpOverload, operator_name

aten = torch.ops.aten
_MEAN, _SUM = 1, 2


def of_whole_batch(joint: JointGraph) -> JointGraph:
    """Return a graph that does the same, and whose operators can be cut.

    Means of `nll_loss` become sums divided by the weight of all valid targets, which depends on the batch alone.
    Constants that are made like a tensor read nothing of it.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in joint.module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    leaf = next(node for node in graph.nodes if node.name in joint.leaves)

    def size(value: Any, before: fx.Node) -> Any:
        """Return a size as an argument of what is inserted: a number, or a node whose value it is."""
        if isinstance(value, int):
            return value
        with graph.inserting_before(before):
            node = graph.call_function(aten.sym_size.int, (leaf, 0))
        node.meta["val"] = value
        return node

    renamed: dict[str, str] = {}
    for number, node in enumerate(filter(is_random, graph.nodes)):
        node.meta["draw"] = number  # in every graph that is made of this one
    for node in [*graph.nodes]:
        if node.target in WEIGHED_MEANS:
            renamed |= _weighed_sum(node)
        elif node.op == "call_function" and isinstance(node.target, OpOverload) and makes_constant(node.target):
            _plain_constant(node, size)

    def name(old: str) -> str:
        return renamed.get(old, old)

    return replace(
        joint,
        module=HeldGraphModule(joint.module, graph),
        loss=None if joint.loss is None else name(joint.loss),
        results=tuple(map(name, joint.results)),
        mutations={state: name(value) for state, value in joint.mutations.items()},
        gradients=tuple((name(value), parameter) for value, parameter in joint.gradients),
    )


def _weighed_sum(node: fx.Node) -> dict[str, str]:
    """Let a loss be summed, and divided by the weight of its targets; return new names of its results."""
    source, target, weight, reduction, ignored = node.args
    if reduction not in (_MEAN, _SUM) or not isinstance(source, fx.Node) or not isinstance(target, fx.Node):
        return {}
    dtype = torch.promote_types(source.meta["val"].dtype, torch.float32)  # which counts further than bfloat16
    valid = _insert(node, aten.ne.Scalar, target, ignored)
    each = _insert(node, aten._to_copy.default, valid, dtype=dtype)
    if isinstance(weight, fx.Node):
        safe = _insert(node, aten.mul.Tensor, target, valid)
        each = _insert(node, aten.mul.Tensor, _insert(node, aten.index.Tensor, weight, [safe]), valid)
    total = _insert(node, aten.sum.default, each)
    node.args = (source, target, weight, _SUM, ignored)
    taken = {user.args[1]: user for user in node.users}
    after = node.next
    summed = taken.get(0) or _insert(after, operator.getitem, node, 0, like=node)
    renamed = {}
    if 1 in taken:
        given = taken[1].meta["val"].dtype  # backwards want the weight in the type of the scores
        weight_of_batch = total if given == dtype else _insert(total.next, aten._to_copy.default, total, dtype=given)
        taken[1].replace_all_uses_with(weight_of_batch)
        renamed[taken[1].name] = weight_of_batch.name
        node.graph.erase_node(taken[1])
    if reduction == _MEAN:
        divided = mean = _insert(summed.next, aten.div.Tensor, summed, total, like=node)
        if divided.meta["val"].dtype != summed.meta["val"].dtype:
            mean = _insert(divided.next, aten._to_copy.default, divided, dtype=summed.meta["val"].dtype, like=node)
        summed.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not divided)
        renamed[summed.name] = mean.name
    return renamed


_ONES = ("ones_like", "new_ones")


def _plain_constant(node: fx.Node, size: Callable[[Any, fx.Node], Any]) -> None:
    """Let a constant be made of its shape."""
    row, value = row_of(node), node.meta["val"]
    content: Any = 1 if operator_name(node) in _ONES else 0
    if Trait.FILLS in row.traits:
        content = node.args[row.filled_with]
    if isinstance(content, fx.Node):
        return
    node.target = aten.full.default
    node.args = ([size(one, node) for one in value.shape], content)
    node.kwargs = {"dtype": value.dtype, "device": value.device}


def _insert(before: fx.Node, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any) -> fx.Node:
    """Insert a call before a node and return it, with all that is known of others: its value, its place, its line.

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
    node.meta["val"] = target(
        *fx.map_arg(args, lambda n: n.meta["val"]),
        **fx.map_arg(kwargs, lambda n: n.meta["val"]),
    )
    return node
