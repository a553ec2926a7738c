"""The places of a graph where samples are mixed, in words: there micro-batches give another result than the batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import UNKNOWN_MIXING, Flow, leading_to
from lightning_pipe.capture.torch_private import operator_name


def mixing_places(joint: JointGraph, flow: Flow) -> str:
    """Return, in words and as far as known, where a step mixes its samples so that micro-batches change it."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    found = {name: reason for name, reason in flow.coupled.items() if reason != UNKNOWN_MIXING}
    if joint.loss is not None and flow.roles[joint.loss] not in ("mean", "sum"):
        found.update(dict.fromkeys(_first_mixing(joint, flow), "neither a mean nor a sum over samples"))
    said: dict[str, None] = {}
    for name, reason in found.items():
        custom: dict[str, Any] = nodes[name].meta.get("custom") or {}
        module = f" in {custom['module']}" if custom.get("module") else ""
        said[f"{reason}{module} at {custom.get('line') or name}"] = None
    most = 4
    more = f", and {len(said) - most} more places" if len(said) > most else ""
    if not said:
        custom = nodes[joint.loss or ""].meta.get("custom") or {}
        return f"No operation is known to mix samples; the loss is made at {custom.get('line') or 'an unknown line'}."
    return f"Samples are mixed: {'; '.join(list(said)[:most])}{more}."


def may_mix(joint: JointGraph, flow: Flow) -> bool:
    """Return whether samples meet each other on the way to the loss, or lie where nobody has followed them."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    return any(
        name in flow.coupled
        or (flow.roles[name] == "cat" and name not in flow.samples and not _keeps_apart(nodes[name], flow))
        for name in leading_to([joint.loss], joint)
    )


def _keeps_apart(node: fx.Node, flow: Flow) -> bool:
    """Return whether an operation with several results, whose samples nobody follows, is known to keep them apart."""

    def lie_before(count: int, inputs: Iterable[fx.Node]) -> bool:
        """Return whether samples of all that have some lie before the last dimensions."""
        found = [(flow.samples.get(n.name), n.meta["val"].ndim) for n in inputs if flow.roles.get(n.name) == "cat"]
        return all(where is not None and where.dim < dims - count for where, dims in found)

    name = operator_name(node)
    if name in ("nll_loss_forward", "nll_loss2d_forward"):  # without a reduction: that would have another role
        return True
    if name == "native_layer_norm":
        return lie_before(len(node.args[1]), node.all_input_nodes[:1])  # type: ignore[arg-type]
    if name.startswith("_scaled_dot_product"):  # over the last dimension but one, of products of the last
        return lie_before(2, node.all_input_nodes)
    return False


def _first_mixing(joint: JointGraph, flow: Flow) -> list[str]:
    """Name the first nodes of the loss that are no sum and no mean of values that are."""
    roles = flow.roles
    nodes = {node.name: node for node in joint.module.graph.nodes}
    pending, seen, found = [nodes[joint.loss or ""]], set[str](), []
    while pending:
        node = pending.pop()
        if node.name in seen:
            continue
        seen.add(node.name)
        unknown = [n for n in node.all_input_nodes if roles.get(n.name) not in ("mean", "sum", "same", "cat")]
        pending.extend(unknown)
        if not unknown:
            found.append(node.name)
    return found
