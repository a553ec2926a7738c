"""Roles of values without a sample dimension: mean, sum or linear in the values of the slices of a batch.

Reductions over samples begin a role, linear operations keep it or turn it into `linear` (a combination of means, sums
and values that do not depend on the samples), anything else makes it `mixed`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.operators import WEIGHED_MEANS, Trait, row_of, takes_output, traits
from lightning_pipe.capture.torch_private import argument_names, has_no_data, operator_name, shape_arguments

Role = Literal["same", "cat", "mean", "sum", "max", "min", "last", "linear", "mixed"]

LINEAR: frozenset[Role] = frozenset({"mean", "sum", "linear"})
MEAN_REDUCTION, _SUM_REDUCTION = 1, 2  # at::Reduction


def sized_inputs(node: fx.Node, joint: JointGraph) -> int:
    """Count the inputs of a node that are Python numbers proportional to the number of samples."""
    return sum(_is_size(n, joint) for n in node.all_input_nodes)


def takes_size_as_number(node: fx.Node) -> bool:
    """Return whether an operation of the step takes a number that depends on the samples as one, not as a shape."""
    if node.meta.get("inserted") or node.meta.get("of_each"):
        return False
    row, shapes = row_of(node), shape_arguments(node)
    first = 0 if Trait.SIZED not in row.traits else row.filled_with or len(node.args)
    given = [n for place, n in enumerate(node.args) if place >= first and place not in shapes]
    values = (n.meta.get("val") for n in given if isinstance(n, fx.Node))
    return any(isinstance(value, (torch.SymInt, torch.SymFloat)) for value in values)


def _is_size(node: fx.Node, joint: JointGraph) -> bool:
    """Return whether a node is a Python number proportional to the number of samples."""
    return proportional_to(node, joint) == 1


def proportional_to(node: fx.Node, joint: JointGraph) -> int:
    """Return the power of the number of samples to which a Python number is proportional, 1 or -1; 0 if to none."""
    meta = node.meta.get("val")
    if joint.symbol is None or not isinstance(meta, (torch.SymInt, torch.SymFloat)):
        return 0
    expression = meta.node.expr
    if joint.symbol not in expression.free_symbols:
        return 0
    return next((power for power in (1, -1) if not (expression / joint.symbol**power).free_symbols), 0)


def _varies_unlike_samples(node: fx.Node, joint: JointGraph) -> bool:
    """Return whether a node is a Python number that depends on the number of samples, but is not proportional to it."""
    meta = node.meta.get("val")
    if joint.symbol is None or not isinstance(meta, (torch.SymInt, torch.SymFloat)):
        return False
    return joint.symbol in meta.node.expr.free_symbols and not _is_size(node, joint)


def reduced(operation: Any, node: fx.Node) -> Role:
    """Return the role of a value without samples that an operation makes of values with samples."""
    if Trait.LIKE in traits(operation):
        return "mixed" if takes_size_as_number(node) else "same"
    schema = argument_names(operation)
    if "reduction" in schema:
        given = operation.args[schema.index("reduction") :]
        found: dict[int, Role] = {MEAN_REDUCTION: "mean", _SUM_REDUCTION: "sum"}
        return found.get(given[0] if given else MEAN_REDUCTION, "mixed")
    return row_of(operation).reduces or "mixed"


def is_total_weight(node: fx.Node) -> bool:
    """Return whether a node takes the weight of all targets out of a negative log likelihood."""
    source = node.args[0] if takes_output(node) else None
    return isinstance(source, fx.Node) and source.target in WEIGHED_MEANS and node.args[1:] == (1,)


def combined(node: fx.Node, inputs: list[Role], joint: JointGraph) -> Role:
    """Return the role of a value computed from reduced values."""
    name, known = operator_name(node), traits(node)
    if Trait.LIKE in known:
        return "mixed" if takes_size_as_number(node) else "same"
    if any(_varies_unlike_samples(n, joint) for n in node.all_input_nodes):
        return "mixed"
    varying = {role for role in inputs if role != "same"}
    sizes = sized_inputs(node, joint)
    if Trait.SCALES in known and len([r for r in inputs if r != "same"]) == 1 and not sizes:
        divides = name == "div" and inputs and inputs[0] == "same" and isinstance(node.args[0], fx.Node)
        squares, rounds = node.args[0] is node.args[1], node.kwargs.get("rounding_mode") is not None
        return "mixed" if divides or squares or rounds else varying.pop()
    if name == "div" and sizes == 1 and varying == {"sum"}:
        return "mean"
    if name == "mul" and sizes == 1 and varying == {"mean"}:
        return "sum"
    if Trait.ADDS in known and varying <= LINEAR:
        return _added(node, inputs)
    if name == "lerp" and varying == {"mean"} and all(role == "same" for role in inputs[2:]):
        return "mean"
    if Trait.BOUNDS in known:
        return _guarded(node, name, inputs)
    if Trait.KEEPS in known and len(varying) == 1:
        return varying.pop()
    if name in ("sum", "mean") and varying <= LINEAR and len(varying) == 1:
        return varying.pop()
    return "mixed"


def _added(node: fx.Node, inputs: list[Role]) -> Role:
    """Return the role of a sum, difference or stack of means, sums and others that do not depend on the samples."""
    varying = {role for role in inputs if role != "same"}
    if varying == {"mean"}:
        return "mean"
    if varying != {"sum"}:
        return "linear"
    if Trait.LINES_UP in traits(node):
        return "sum" if "same" not in inputs else "linear"
    constant = any(isinstance(a, (int, float)) and a != 0 for a in node.args[1:2])
    same = (n for n, role in zip(node.all_input_nodes, inputs, strict=True) if role == "same")
    return "linear" if constant or not all(map(_is_zero, same)) else "sum"


def _is_zero(node: fx.Node) -> bool:
    """Return whether a node is made of zeros, as those that a loop starts to add to."""
    while Trait.KEEPS in traits(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    row = row_of(node)
    if Trait.FILLS in row.traits:
        return not any(node.args[row.filled_with :])
    if node.op == "get_attr":
        constant = getattr(node.graph.owning_module, str(node.target), None)
        return isinstance(constant, torch.Tensor) and not has_no_data(constant) and not bool(constant.any())
    return Trait.ZEROS in row.traits


def _guarded(node: fx.Node, name: str, inputs: list[Role]) -> Role:
    """Return the role of what keeps a reduced value finite or within bounds, which is taken to change nothing."""
    kept = inputs[1:] if name == "where" and isinstance(node.args[0], fx.Node) else inputs
    varying = {role for role in kept if role != "same"}
    return varying.pop() if len(varying) == 1 and varying <= LINEAR else "mixed"
