"""Sample dimensions of the values of a joint graph, and how values of slices make those of the whole batch.

For every value: along which dimension its samples lie, and how the values of slices of the batch make the value of the
whole batch. Nodes that mix samples (batch statistics, contrastive losses) are found on the way: there micro-batches
and slices give another result than the whole batch would.

The rules look at symbolic shapes and operators only. A value without a sample dimension that was reduced over samples
is `mean`, `sum`, `max` or `min` as long as only linear operations follow; `linear` is a combination of means, sums and
values that do not depend on the samples, which `loss_terms` turns into a mean. Anything else is `mixed`, and treated
as a mean of slices. Operations that only keep a loss finite (`clamp`, `nan_to_num`, `where`) are assumed to be idle.

Legend: n number of samples (the graph's symbol); rows: rows of a flattened dimension that belong to one sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.value_roles import (
    LINEAR,
    Role,
    combined,
    is_total_weight,
    reduced,
    takes_size_as_number,
)
from lightning_pipe.capture.operators import Trait, takes_batch_statistics, takes_output, traits
from lightning_pipe.capture.steps.stage_program import Combine, Value, memory_order
from lightning_pipe.capture.torch_private import argument_defaults, argument_names, is_backward, operator_name

BATCH_STATISTICS = "batch statistics"
UNKNOWN_MIXING = "samples may be mixed"  # by some operation, as numbers show


@dataclass(frozen=True)
class SampleRows:
    """Where the samples of a value lie: `rows` consecutive rows of `dim` each, all of them `outer` times."""

    dim: int
    rows: int
    outer: int = 1


@dataclass(frozen=True)
class Flow:
    """What is known of every node by name.

    Attributes:
        roles: how slices combine.
        samples: where samples lie; absent where they do not, or not in consecutive rows.
        coupled: nodes that mix samples, with the reason.
        assumed: nodes that keep the role of what they are given as long as they are idle (`clamp`).
        loss: role of the loss; "mixed" means that the loss is no sum or mean over samples.
    """

    roles: dict[str, Role]
    samples: dict[str, SampleRows]
    coupled: dict[str, str]
    assumed: frozenset[str]
    loss: Role

    def with_loss(self, joint: JointGraph, role: Role) -> Flow:
        """Return the same with another role of the loss."""
        assert joint.loss is not None, "a step with a loss"
        return replace(self, roles={**self.roles, joint.loss: role}, loss=role)


def follow(joint: JointGraph) -> Flow:
    """Follow the samples through the forward nodes of a graph, in order."""
    roles: dict[str, Role] = {}
    samples: dict[str, SampleRows] = {}
    coupled: dict[str, str] = {}
    assumed: set[str] = set()
    scaled: set[str] = set()  # values with samples, into which their number has entered as a number
    for node in joint.module.graph.nodes:
        if node.op == "output" or node.name in joint.tangents:
            continue
        if is_backward(node):
            found = _locate(node, joint, samples)
            if found is not None:
                samples[node.name] = found
            roles[node.name] = "cat" if _has_samples(node, joint) else "sum"
            continue
        role = _role(node, joint, roles)
        if (role == "cat" and takes_size_as_number(node)) or any(n.name in scaled for n in node.all_input_nodes):
            scaled.add(node.name)
            role = "cat" if role == "cat" else "mixed"  # `(losses / len(losses)).sum()` is a mean, say
        roles[node.name] = role
        if role in LINEAR and Trait.BOUNDS in traits(node):
            assumed.add(node.name)
        if role == "cat":
            found = _locate(node, joint, samples)
            if found is not None:
                samples[node.name] = found
            reason = "" if node.meta.get("of_each") else _coupling(node, joint, roles, samples)
            if reason:
                coupled[node.name] = reason
    for name in joint.results[len(joint.results) - len(joint.record.guards) :]:
        roles[name] = "max"
    loss: Role = roles[joint.loss] if joint.loss is not None else "same"
    return Flow(roles, samples, coupled, frozenset(assumed), loss)


def leading_to(names: Iterable[str | None], joint: JointGraph) -> set[str]:
    """Name the nodes from which these are computed, and these."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    pending, found = [nodes[name] for name in names if name in nodes], set[str]()
    while pending:
        node = pending.pop()
        if node.name not in found:
            found.add(node.name)
            pending.extend(node.all_input_nodes)
    return found


def leading_only_to(names: Iterable[str], joint: JointGraph) -> set[str]:
    """Name the nodes that do nothing but compute these results, and copies of them that are returned."""
    nodes, names = {node.name: node for node in joint.module.graph.nodes}, {*names}
    kept = {joint.loss, *joint.results, *joint.mutations.values(), *(name for name, _ in joint.gradients)} - names
    found, pending = set[str](), [nodes[name] for name in names]
    while pending:
        node = pending.pop()
        copies = [user for user in node.users if {reader.op for reader in user.users} == {"output"}]
        others = [user.name for user in node.users if user not in copies and user.op != "output"]
        if node.op == "call_function" and node.name not in kept and found.issuperset(others):
            found |= {node.name, *(copy.name for copy in copies)}
            pending += node.all_input_nodes
    return found


def value(node: fx.Node, joint: JointGraph, flow: Flow) -> Value:
    """Describe a value that leaves its stage."""
    meta = node.meta["val"]
    found, role = flow.samples.get(node.name), flow.roles[node.name]
    return Value(
        name=node.name,
        dtype=meta.dtype if isinstance(meta, torch.Tensor) else None,
        size=size_function(meta, joint),
        size_in_batch=_size_in_batch(meta, joint),
        batch_dim=found.dim if found else None,
        rows=found.rows if found else 1,
        outer=found.outer if found else 1,
        combine=_combining(role),
        order=_memory_order(meta, joint),
    )


def _combining(role: Role) -> Combine:
    match role:
        case "mixed" | "linear":
            return "mean"
        case _:
            return role


def _memory_order(meta: Any, joint: JointGraph) -> tuple[int, ...]:
    """Return the dimensions of a value from the slowest to the fastest, () if that is their own order."""
    if not isinstance(meta, torch.Tensor):
        return ()
    return memory_order([s if isinstance(s, int) else int(_at_capture(s, joint)) for s in meta.stride()])


def _at_capture(size: torch.SymInt, joint: JointGraph) -> Any:
    return joint.at(size.node.expr, joint.samples)


def size_function(meta: Any, joint: JointGraph) -> Callable[[int], tuple[int, ...]]:
    """Return the shape of a value as a function of the number of samples."""
    sizes: tuple[Any, ...] = tuple(meta.shape) if isinstance(meta, torch.Tensor) else ()
    fixed = tuple(size if isinstance(size, int) else None for size in sizes)
    expressions = [size.node.expr for size in sizes if not isinstance(size, int)]

    @functools.cache
    def size(samples: int) -> tuple[int, ...]:
        varying = iter(int(joint.at(e, samples)) for e in expressions)
        return tuple(next(varying) if entry is None else entry for entry in fixed)

    return size


def _size_in_batch(meta: Any, joint: JointGraph) -> Callable[[int, int], tuple[int, ...]] | None:
    """Return a shape as a function of the samples of the value and of the batch; None if the latter do not matter."""
    sizes: tuple[Any, ...] = tuple(meta.shape) if isinstance(meta, torch.Tensor) else ()
    symbols = {symbol for size in sizes if not isinstance(size, int) for symbol in size.node.expr.free_symbols}
    if joint.batch_symbol is None or joint.batch_symbol not in symbols:
        return None

    @functools.cache
    def size_in_batch(samples: int, batch_samples: int) -> tuple[int, ...]:
        return tuple(
            size if isinstance(size, int) else int(joint.at(size.node.expr, samples, batch_samples=batch_samples))
            for size in sizes
        )

    return size_in_batch


def _tensor_shape(node: fx.Node) -> tuple[Any, ...]:
    meta = node.meta.get("val")
    return tuple(meta.shape) if isinstance(meta, torch.Tensor) else ()


def _depends(size: Any, joint: JointGraph) -> bool:
    return joint.symbol is not None and isinstance(size, torch.SymInt) and joint.symbol in size.node.expr.free_symbols


def _sample_dims(node: fx.Node, joint: JointGraph) -> list[int]:
    return dims_with_samples(node.meta.get("val"), joint)


def dims_with_samples(value: Any, joint: JointGraph) -> list[int]:
    """List the dimensions of a traced value whose size depends on the number of samples; none if it is no tensor."""
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return [d for d, size in enumerate(shape) if _depends(size, joint)]


def _has_samples(node: fx.Node, joint: JointGraph) -> bool:
    if joint.symbol is not None:
        return bool(_sample_dims(node, joint))
    if joint.is_of_whole_batch(node.name):
        return False
    shape = _tensor_shape(node)
    return bool(shape) and shape[0] == joint.samples


def _role(node: fx.Node, joint: JointGraph, roles: dict[str, Role]) -> Role:
    meta = node.meta.get("val")
    weighed: Role | None = node.meta.get("role")  # by `denominator_totals` or `loss_terms`
    if weighed is not None:
        return weighed
    if isinstance(meta, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
        return "same"
    if isinstance(meta, (tuple, list)):
        outputs = [m for m in meta if isinstance(m, torch.Tensor)]
        if joint.symbol is not None and any(_depends(size, joint) for m in outputs for size in m.shape):
            return "cat"
    if _has_samples(node, joint):
        return "cat"
    if node.op == "placeholder" or node.op == "get_attr":
        return "same"
    inputs = [roles.get(n.name, "same") for n in node.all_input_nodes]
    if takes_output(node):
        if is_total_weight(node):
            return "sum"
        if inputs[0] in ("max", "min") and node.args[1] != 0:
            return "mixed"  # where the extreme is
        return reduced(node.args[0], node) if inputs[0] == "cat" else inputs[0]
    if all(role == "same" for role in inputs):
        return "mixed" if takes_size_as_number(node) else "same"
    if "cat" in inputs:
        return reduced(node, node)
    return combined(node, inputs, joint)


def _locate(node: fx.Node, joint: JointGraph, samples: dict[str, SampleRows]) -> SampleRows | None:
    """Find the dimension of the samples, if each sample's rows are consecutive."""
    dims = _sample_dims(node, joint)
    if joint.symbol is None:
        return _leaf_samples(node, joint)
    if len(dims) != 1:
        return None
    shape = _tensor_shape(node)
    rows = shape[dims[0]].node.expr / joint.symbol
    if not rows.is_Integer:
        return None
    if rows == 1:
        return SampleRows(dims[0], 1)
    sources = [(n, samples[n.name]) for n in node.all_input_nodes if n.name in samples]
    if Trait.RESHAPES in traits(node):
        return SampleRows(dims[0], int(rows)) if sources and _outermost(sources[0], shape, dims[0]) else None
    for source, where in sources:
        if where.rows == rows and _tensor_shape(source)[where.dim].node.expr == shape[dims[0]].node.expr:
            return SampleRows(dims[0], int(rows))
    return None


def _leaf_samples(node: fx.Node, joint: JointGraph) -> SampleRows | None:
    """In a graph of constant size only the batch's own leaves are known to have their samples first."""
    is_leaf = (
        node.name in joint.leaves
        and not joint.is_of_whole_batch(node.name)
        and bool(_tensor_shape(node))
        and _tensor_shape(node)[0] == joint.samples
    )
    return SampleRows(0, 1) if is_leaf else None


def _outermost(source: tuple[fx.Node, SampleRows], shape: tuple[Any, ...], dim: int) -> bool:
    """Return whether a view keeps the samples outermost: equally many elements lie before them on both sides."""
    node, where = source

    def elements(sizes: tuple[Any, ...]) -> Any:
        product: Any = 1
        for size in sizes:
            product = product * (size if isinstance(size, int) else size.node.expr)
        return product

    return bool(elements(_tensor_shape(node)[: where.dim]) == elements(shape[:dim]))


def _coupling(node: fx.Node, joint: JointGraph, roles: dict[str, Role], samples: dict[str, SampleRows]) -> str:
    """Return why a node mixes samples, "" if it does not."""
    if takes_batch_statistics(node) and _trains(node):
        return BATCH_STATISTICS
    if node.op != "call_function" or takes_output(node):
        return ""
    if len(_sample_dims(node, joint)) > 1:
        return "every sample meets every other"
    reduced = [n for n in node.all_input_nodes if roles.get(n.name) in ("mean", "sum", "max", "min", "mixed")]
    if reduced:
        return "a value of all samples is used for each"
    if Trait.ALONG in traits(node):
        first = node.all_input_nodes[0]
        where, dims = samples.get(first.name), _dims_along(node)
        if where is not None and any(dim % len(_tensor_shape(first)) == where.dim for dim in dims):
            return f"{operator_name(node)} runs along the samples"
    if Trait.SELECTS in traits(node) and any(operator_name(n) == "randperm" for n in node.all_input_nodes):
        return "samples are shuffled"
    return ""


def _dims_along(node: fx.Node) -> list[int]:
    """List the dimensions along which an operation runs: as it is told, or as it does if it is not told."""
    names, defaults = argument_names(node), argument_defaults(node)
    for place, name in enumerate(names):
        if name in ("dim", "dims"):
            given: Any = node.kwargs.get(name, node.args[place] if place < len(node.args) else defaults.get(name))
            dims = [*given] if isinstance(given, (list, tuple)) else [given]
            return [dim for dim in dims if isinstance(dim, int)] or [*range(len(_tensor_shape(node)))]  # `roll` of all
    return []


def _trains(node: fx.Node) -> bool:
    names = argument_names(node)
    flags = [a for a, n in zip(node.args, names, strict=False) if n in ("training", "train")]
    return all(flags) if flags else True
