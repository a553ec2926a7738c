"""Lengths that change from batch to batch: one trace whose graph holds for many of them.

Sequences are as long as the longest of their batch, so a step meets new shapes all the time. The second one that it
meets is traced with symbols in the place of the sizes that have changed. For every other one the numbers are put in
again, in a seventh of the time of a trace; conditions that the trace noted on its symbols say whether that is right.

    lengths = changed_sizes(one, two, batch_dim=0)
    joint = trace(replace(request, lengths=lengths))       symbols for samples and lengths
    at_lengths(joint, structure.leaves)                    a symbol for samples only; None if it does not hold
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from lightning_pipe.capture import torch_private as private
from lightning_pipe.capture.graphs.joint_graph import JointGraph, is_layout_choice
from lightning_pipe.capture.steps.batch import Leaf, Structure
from lightning_pipe.capture.steps.numbers import sized_at
from lightning_pipe.capture.steps.record import LogCall, ObjectCall, Sized, StepRecord
from lightning_pipe.capture.steps.trees import mapped

Lengths: TypeAlias = frozenset[tuple[int, int]]  # (tensor of the batch, dimension)
_LEAST = 2  # a symbol stands for no smaller size: torch treats 0 and 1 otherwise


def changed_sizes(one: Structure, two: Structure, *, batch_dim: int) -> Lengths | None:
    """Return the sizes that differ, but for samples; None if other things differ, too."""
    if len(one.leaves) != len(two.leaves):
        return None
    for a, b in zip(one.leaves, two.leaves, strict=True):
        if (a.dtype, len(a.shape)) != (b.dtype, len(b.shape)):
            return None
    return frozenset(
        (i, dim)
        for i, (a, b) in enumerate(zip(one.leaves, two.leaves, strict=True))
        for dim, sizes in enumerate(zip(a.shape, b.shape, strict=True))
        if dim != batch_dim and sizes[0] != sizes[1]
    )


def at_lengths(joint: JointGraph, leaves: Sequence[Leaf]) -> JointGraph | None:
    """Return the graph for tensors of these sizes; None if the trace does not hold for them.

    Args:
        joint: a graph with symbols for lengths.
        leaves: tensors of a batch; the number of their samples does not matter.
    """
    if not _constants_hold(joint, leaves):
        return None
    sizes: dict[sympy.Symbol, sympy.Integer] = {}
    for (leaf, dim), symbol in joint.lengths.items():
        size = leaves[leaf].shape[dim]
        if size < _LEAST:
            return None
        sizes[symbol] = sympy.Integer(size)
    conditions = []
    for condition, origin in joint.conditions:
        now = condition.xreplace(sizes)
        if now == sympy.false and not is_layout_choice(origin):
            return None
        if now.free_symbols:
            conditions.append((now, origin))
    module = _module_at(joint, sizes)
    record = _record_at(joint.record, sizes)
    return replace(joint, module=module, conditions=tuple(conditions), record=record, lengths={}, identity="")


def _constants_hold(joint: JointGraph, leaves: Sequence[Leaf]) -> bool:
    """Return whether the sizes that are constants of a graph are those of a batch."""
    return all(
        leaves[joint.leaves[node.name]].shape[dim] == size
        for node in joint.module.graph.find_nodes(op="placeholder")
        if joint.leaves.get(node.name, len(leaves)) < len(leaves)
        for dim, size in enumerate(node.meta["val"].shape)
        if isinstance(size, int)
    )


def _module_at(joint: JointGraph, sizes: Mapping[sympy.Symbol, sympy.Integer]) -> fx.GraphModule:
    """Copy a graph with numbers for symbols; operations on numbers alone become constants."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    known: dict[Any, Any] = {}
    for node in joint.module.graph.nodes:
        value = _value_at(node.meta.get("val"), sizes, joint, known)
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)) and isinstance(value, (int, float)):
            copies[node] = value
            continue
        copy = graph.node_copy(node, lambda n: copies[n])
        assert copy.name == node.name, "names are given in the same order"
        if "val" in node.meta:
            copy.meta["val"] = value
        copies[node] = copy
    return private.HeldGraphModule(joint.module, graph)


def _value_at(value: Any, sizes: Mapping[Any, Any], joint: JointGraph, known: dict[Any, Any]) -> Any:
    """Return what is known of a node's value, with numbers for symbols."""
    if isinstance(value, (tuple, list)):
        return type(value)(_value_at(item, sizes, joint, known) for item in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return _size_at(value, sizes, joint, known)
    if not isinstance(value, torch.Tensor):
        return value
    if not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
        return value
    shape, stride = ([_size_at(s, sizes, joint, known) for s in one] for one in (value.shape, value.stride()))
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)


def _size_at(size: Any, sizes: Mapping[Any, Any], joint: JointGraph, known: dict[Any, Any]) -> Any:
    """Return a size, or a number computed from sizes, with numbers for symbols."""
    if not isinstance(size, (torch.SymInt, torch.SymFloat)):
        return size
    expression, whole = size.node.expr, isinstance(size, torch.SymInt)
    if (expression, whole) not in known:
        number = int if whole else float
        now = expression.xreplace(sizes)
        if now.free_symbols:
            env = size.node.shape_env
            make = env.create_symintnode if whole else env.create_symfloatnode
            known[expression, whole] = make(
                now, hint=number(now.xreplace({joint.symbol: sympy.Integer(joint.samples)}))
            )
        else:
            known[expression, whole] = number(now)
    return known[expression, whole]


def _record_at(record: StepRecord, sizes: Mapping[sympy.Symbol, sympy.Integer]) -> StepRecord:
    """Return what a step said, with numbers for symbols."""

    def at(value: Any) -> Any:
        return mapped(value, (Sized,), lambda one: sized_at(one, sizes))

    calls: list[LogCall | ObjectCall] = [
        replace(one, value=at(one.value), kwargs=at(one.kwargs))
        if isinstance(one, LogCall)
        else replace(one, args=at(one.args), kwargs=at(one.kwargs))
        for one in record.calls
    ]
    kept = tuple(replace(one, value=at(one.value)) for one in record.kept)
    outputs = tuple(one.mapped(at) for one in record.outputs)
    return replace(record, calls=tuple(calls), returned=at(record.returned), kept=kept, outputs=outputs)
