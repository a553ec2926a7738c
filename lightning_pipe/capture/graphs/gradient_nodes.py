"""Rewrites of a fresh joint graph after which every gradient of a parameter has a node of its own.

Input and weight gradients of convolutions are made by separate nodes, so that I and W can be separated. Parameters
whose gradients are one tensor get copies of it. Copies of state stand beside their readers, so that a cut can lie
before them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_pipe.capture.graphs.joint_graph import JointGraph


def with_gradients_apart(joint: JointGraph) -> JointGraph:
    """Return a fresh graph, changed in place, in which every gradient of a parameter has a node of its own."""
    split_input_and_weight_gradients(joint)
    put_copies_beside_readers(joint)
    return with_own_gradients(joint)


def split_input_and_weight_gradients(joint: JointGraph) -> None:
    """Compute input and weight gradient of convolutions by separate nodes, so that I and W can be separated.

    Done once, in place, on a fresh graph.
    """
    graph = joint.module.graph
    for node in [n for n in graph.nodes if n.target is torch.ops.aten.convolution_backward.default]:
        *others, mask = node.args
        if not (mask[0] and (mask[1] or mask[2])):
            continue
        with graph.inserting_before(node):
            weight = graph.call_function(node.target, (*others, [False, mask[1], mask[2]]))
        weight.meta = dict(node.meta)
        node.args = (*others, [True, False, False])
        for user in reversed([u for u in node.users if u.args[1] != 0]):
            user.args = (weight, user.args[1])
            weight.append(user)  # so that the gradient can be given away at once


def put_copies_beside_readers(joint: JointGraph) -> None:
    """Move the copy that is made of a buffer before the step to its first reader, in place."""
    order = {node: place for place, node in enumerate(joint.module.graph.nodes)}
    for node in [n for n in order if n.target is torch.ops.aten.clone.default and n.args[0].op == "placeholder"]:
        if node.args[0].name in joint.buffers and node.users:
            min(node.users, key=order.__getitem__).prepend(node)


def with_own_gradients(joint: JointGraph) -> JointGraph:
    """Return a graph in which no two parameters have the same node as their gradient, as those of `a + b` would.

    Done once, on a fresh graph, whose module is changed in place.
    """
    nodes = {node.name: node for node in joint.module.graph.nodes}
    found: dict[str, str] = {}
    for name, parameter in joint.gradients:
        own = nodes[name]
        if name in found:
            with joint.module.graph.inserting_after(own):
                own = joint.module.graph.call_function(torch.ops.aten.clone.default, (nodes[name],))
            own.meta = {**nodes[name].meta, "partitioner_tag": "is_backward"}
        found[own.name] = parameter
    return replace(joint, gradients=tuple(found.items()))
