"""The places of a graph where samples are mixed, in words: there micro-batches give another result than the batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import (
    BATCH_STATISTICS,
    UNKNOWN_MIXING,
    Flow,
    dims_with_samples,
    leading_to,
    size_function,
)
from lightning_pipe.capture.graphs.value_roles import takes_size_as_number
from lightning_pipe.capture.operators import Trait, row_of, traits
from lightning_pipe.capture.torch_private import argument_names, is_backward, named_arguments, operator_name


def mixing_places(joint: JointGraph, flow: Flow) -> str:
    """Return, in words and as far as known, where a step mixes its samples so that micro-batches change it."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    found = {name: reason for name, reason in flow.coupled.items() if reason != UNKNOWN_MIXING}
    if joint.loss is not None and flow.roles[joint.loss] not in ("mean", "sum"):
        found.update(dict.fromkeys(_first_mixing(joint, flow), "neither a mean nor a sum over samples"))
    if not found:
        found = dict.fromkeys(flow.assumed & leading_to([joint.loss], joint), "a value of all samples is bounded")
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
    last = row_of(node).meets_in
    if isinstance(last, str):
        last = len(dict(zip(argument_names(node), node.args, strict=False))[last])  # type: ignore[arg-type]
    if last is None:
        return False
    operands = [n for n in node.all_input_nodes if flow.roles.get(n.name) == "cat"]
    found = [(flow.samples.get(n.name), n.meta["val"].ndim) for n in operands]
    return all(where is not None and where.dim < dims - last for where, dims in found)


def mixed_beside_loss(joint: JointGraph, flow: Flow) -> set[str]:
    """Name the values in which samples meet, or have a number, as far as the loss is not made of that.

    Where the loss is, numbers tell what that changes. Batch statistics are told of for themselves.
    """
    told, found = leading_to([joint.loss], joint), set[str]()
    for node in joint.module.graph.nodes:
        if is_backward(node):
            continue
        is_mixed = meets_others(node, flow) or is_of_their_number(node, joint) or is_placed(node, flow)
        own = node.name not in told and is_mixed
        if own or any(n.name in found for n in node.all_input_nodes if not is_picked_by(n, node)):
            found.add(node.name)
    return found


def reads_samples(joint: JointGraph, flow: Flow, names: Iterable[str]) -> set[str]:
    """Name those of these values into which the number of samples may have entered as a number: `(loss / n).sum()`.

    Into those of a graph of constant size it may have entered anywhere. A sum that is divided by it is known as a mean.
    """
    names = set(names)
    if joint.symbol is None:
        return names
    found = set[str]()
    for node in joint.module.graph.nodes:
        if is_backward(node) or not isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            continue
        scales = operator_name(node) in ("mul", "div") and flow.roles.get(node.name) in ("mean", "sum")
        takes = takes_size_as_number(node) and (
            not scales or any(flow.roles.get(n.name) == "cat" for n in node.all_input_nodes)
        )
        if takes or any(n.name in found for n in node.all_input_nodes):
            found.add(node.name)
    return names & found


def meets_others(node: fx.Node, flow: Flow) -> bool:
    """Return whether samples are known to meet in a value, otherwise than by batch statistics."""
    return flow.coupled.get(node.name, BATCH_STATISTICS) not in (BATCH_STATISTICS, UNKNOWN_MIXING)


def is_of_their_number(node: fx.Node, joint: JointGraph) -> bool:
    """Return whether a value is made of the number of samples (`torch.arange(n)`), or has not so many rows of each."""
    value: Any = node.meta.get("val")
    dims = dims_with_samples(value, joint)
    rows = (value.shape[dim].node.expr / joint.symbol for dim in dims)
    return (bool(dims) and Trait.COUNTS in traits(node)) or any(joint.symbol in one.free_symbols for one in rows)


def is_placed(node: fx.Node, flow: Flow) -> bool:
    """Return whether an operation sets samples by where they lie, as the derivative of `logits[0]` does."""
    name, where = operator_name(node), flow.samples.get(node.name)
    if where is None or name not in _PLACING:
        return False
    given = named_arguments(node)
    if "indices" in given:
        indices: Any = given["indices"]
        index = indices[where.dim] if where.dim < len(indices) else None
        return isinstance(index, fx.Node) and flow.roles.get(index.name, "same") != "cat"
    if given["dim"] % node.meta["val"].ndim != where.dim:
        return False
    return "start" not in given or bool(given["start"]) or (given["end"] is not None and given["end"] < sys.maxsize)


_PLACING = "select_backward slice_backward select_scatter slice_scatter index_put index_put_ _unsafe_index_put".split()


def is_picked_by(index: fx.Node, node: fx.Node) -> bool:
    """Return whether numbers of samples only pick what is of each sample: `logits[torch.arange(n), classes]`."""
    return Trait.SELECTS in traits(node) and Trait.COUNTS in traits(index) and index is not node.args[0]


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


def single_statistics(joint: JointGraph, flow: Flow, samples: int) -> str:
    """Name a batch norm that would see one value per channel; eager torch refuses it, a graph would not."""
    looking = {name for name, reason in flow.coupled.items() if reason == BATCH_STATISTICS}
    nodes = {node.name: node for node in joint.module.graph.nodes if node.name in looking} if looking else {}
    for name in filter(nodes.get, flow.coupled):
        _, channels, *_ = shape = size_function(nodes[name].args[0].meta["val"], joint)(samples)
        if math.prod(shape) <= channels:
            custom = nodes[name].meta.get("custom") or {}
            return f"batch statistics of a single value per channel in {custom.get('module') or name}"
    return ""
