"""Numbers of samples of the whole batch, where rows are divided by the number of samples of a slice: `rows / len(x)`.

A step that differentiates a mean itself (`torch.autograd.grad(loss, x)`) divides every row by the number of samples, as
an operation of its own or inside a kernel. Of the batch, every row is divided by the number of its samples, which the
totals know (`denominator_totals`):

    row of the batch = row of a slice * samples of the slice / samples of the batch

That is 1.0 exactly where the batch is not cut. What gradients of the step flow back through stays as it is: they are
weighed with the loss.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import Flow, follow, leading_to
from lightning_pipe.capture.graphs.value_roles import MEAN_REDUCTION, proportional_to
from lightning_pipe.capture.slicing.insert import insert
from lightning_pipe.capture.torch_private import is_backward, named_arguments, operator_name

_aten = torch.ops.aten


def dividing_rows(joint: JointGraph, flow: Flow, *, but: set[str]) -> dict[fx.Node, int]:
    """Return the operations that divide rows of samples by a power of the number of samples, and the power.

    They are marked as what makes rows of each sample by itself, so that what follows from them is seen, too.

    Args:
        joint: the graph.
        flow: what is known of its values.
        but: names of those that are counted of the whole batch anyway.
    """
    found = dict[fx.Node, int]()
    if joint.symbol is None:
        return found
    trained = leading_to([joint.loss], joint) if joint.gradients else set[str]()
    nodes = [
        node
        for node in joint.module.graph.nodes
        if node.op == "call_function"
        and not (is_backward(node) or node.name in trained or node.name in but or node.meta.get("inserted"))
    ]
    while True:
        new = {node: power for node in nodes if node not in found and (power := _power(node, joint, flow))}
        if not new:
            return found
        found |= new
        for node in new:
            node.meta["of_each"] = True
        flow = follow(joint)


def _power(node: fx.Node, joint: JointGraph, flow: Flow) -> int:
    """Return the power of the number of samples by which rows are divided; 0 if they are not, or nobody knows."""
    name, first = operator_name(node), node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or flow.roles.get(first.name, "same") not in ("same", "cat"):
        return 0
    if name in ("div", "mul") and len(node.args) == 2 and not node.kwargs.get("rounding_mode"):
        by: Any = node.args[1]
        power = proportional_to(by, joint) if isinstance(by, fx.Node) else 0
        return power if name == "div" else -power
    given = named_arguments(node)
    is_kernel = name.endswith("_backward") and given.get("reduction") == MEAN_REDUCTION
    return int(is_kernel and flow.roles.get(node.name) == "cat")


def divide_by_batch(node: fx.Node, power: int, samples: Any, number: fx.Node) -> None:
    """Let an operation of `dividing_rows` divide by the number of samples of the batch; its name stays.

    Args:
        node, power: the operation, and the power.
        samples: their number in a slice.
        number: that of the whole batch.
    """
    of_slice = insert(node, _aten.add.Tensor, insert(node, _aten.zeros_like.default, number), samples)
    ratio = insert(node, _aten.div.Tensor, *((of_slice, number) if power > 0 else (number, of_slice)))
    of_slice.meta["of_slice"] = ratio.meta["of_slice"] = True
    rows = insert(node, node.target, *node.args, like=node, **cast("dict[str, Any]", node.kwargs))
    rows.meta["of_each"] = True
    node.target, node.args, node.kwargs = _aten.mul.Tensor, (rows, ratio), {}


def is_of_slice(node: fx.Node) -> bool:
    """Return whether a value is the number of samples of a slice, or their share of the batch."""
    return bool(node.meta.get("of_slice"))
