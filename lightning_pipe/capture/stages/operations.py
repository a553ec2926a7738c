"""Operations and tensors of a joint graph as cost models see them: forward and backward, without torch.

`core.graph` says what the fields mean. Outputs of an operation with several outputs are tensors of that operation.
Gradients of a parameter that several stages use are taken to be added once per step (`Splitter` without `exact_ties`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from lightning_pipe.capture.graphs.fingerprint import spelled
from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.value_sizes import Sizes
from lightning_pipe.capture.operators import shares_memory_with, takes_output
from lightning_pipe.capture.stages.assign import Kinds, positions, sums_gradients
from lightning_pipe.capture.stages.batched_weight_grad import Joining
from lightning_pipe.capture.torch_private import is_backward
from lightning_pipe.core.graph import Operation, Phase, Tensor


@dataclass(frozen=True)
class Operations:
    """Operations and tensors of a joint graph, and those of its outputs."""

    operations: tuple[Operation, ...]
    tensors: tuple[Tensor, ...]
    gradients: tuple[tuple[int, str], ...]
    results: tuple[int, ...]
    updates: tuple[tuple[int, str], ...]


def operations_of(joint: JointGraph, kinds: Kinds, aliases: Mapping[str, str], joining: Joining) -> Operations:
    """Describe a joint graph.

    Args:
        joint: the graph.
        kinds: its nodes by kind.
        aliases: parameter name -> canonical name.
        joining: what a joined W can read and run.
    """
    return _Description(joint, kinds, aliases, joining).all()


def operation_nodes(joint: JointGraph) -> Iterator[fx.Node]:
    """List the nodes that are operations, in order: computed, not merely taken out of a tuple, and no sizes."""
    for node in joint.module.graph.nodes:
        if node.op == "call_function" and not takes_output(node) and tensors_of(node):
            yield node


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """List the tensors that a node results in."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


class _Description:
    def __init__(self, joint: JointGraph, kinds: Kinds, aliases: Mapping[str, str], joining: Joining) -> None:
        self._joint, self._kinds, self._aliases, self._joining = joint, kinds, aliases, joining
        self._sizes = Sizes(joint)
        self._places = positions(joint, kinds)
        self._of_head = frozenset(() if joint.head is None else joint.head.outputs)
        self._nodes = list(operation_nodes(joint))
        self._number = {node.name: i for i, node in enumerate(self._nodes)}
        self._terms = _sums_of_terms(joint)
        self._reach = self._reaches()
        self._index: dict[str, int] = {}
        self._made: list[Tensor] = []

    def all(self) -> Operations:
        for node in self._joint.module.graph.nodes:
            self._add_tensors(node)
        index = self._index
        return Operations(
            operations=tuple(self._operation(node) for node in self._nodes),
            tensors=tuple(self._made),
            gradients=tuple((index[name], self._aliases[p]) for name, p in self._joint.gradients if name in index),
            results=tuple(index[name] for name in self._result_names() if name in index),
            updates=tuple((index[name], state) for state, name in self._joint.mutations.items() if name in index),
        )

    def _result_names(self) -> list[str]:
        loss = [self._joint.loss] if self._joint.loss else []
        return list(dict.fromkeys([*loss, *self._joint.results]))

    def _operation(self, node: fx.Node) -> Operation:
        at = self._places.get(node.name, -1)
        reads = [self._index[n.name] for n in node.all_input_nodes if n.name in self._index]
        inputs = [n.name for n in node.all_input_nodes]
        parameters, buffers = self._joint.parameters, self._joint.buffers
        return Operation(
            name=node.name,
            op=spelled(node.target),
            phase=self._phase(node),
            at=at,
            reach=self._reach.get(node.name, at),
            reads=tuple(dict.fromkeys(reads)),
            parameters=tuple(sorted({self._aliases[parameters[name]] for name in inputs if name in parameters})),
            buffers=tuple(sorted({buffers[name] for name in inputs if name in buffers})),
            adds_terms=node.name in self._terms,
            view=shares_memory_with(node) is not None,
            flops=flops_of(node, self._sizes, self._joint.samples),
            touched_bytes=touched_bytes(node, self._sizes, self._joint.samples),
            joinable=node.name in self._joining.operations,
            dtype=str(tensors_of(node)[0].dtype).removeprefix("torch."),
            checkpoint=(node.meta.get("custom") or {}).get("checkpoint", -1),
        )

    def _phase(self, node: fx.Node) -> Phase:
        if node.name in self._kinds.repeated:
            return "repeated"
        return "backward" if is_backward(node) else "forward"

    def _add_tensors(self, node: fx.Node) -> None:
        """Add what a node is as a tensor: a field of the batch, or a result of an operation or of the head."""
        if node.name in self._joint.leaves or node.name in self._of_head:
            maker = -1
        elif node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            return
        else:
            maker = self._number[_source(node).name]
        per_sample, fixed = self._sizes.line(node)
        shared = shares_memory_with(_source(node)) if node.op == "call_function" else None
        base = self._index.get(shared.name, -1) if shared is not None else -1
        self._index[node.name] = len(self._made)
        of_state, joinable = shared is not None and base < 0, node.name in self._joining.values
        self._made.append(Tensor(node.name, maker, base, per_sample, fixed, of_state, joinable))

    def _reaches(self) -> dict[str, int]:
        """Return, for every backward node, the smallest position to which its result flows."""
        found: dict[str, int] = {}
        for node in reversed(self._joint.module.graph.nodes):
            if node.name in self._places and is_backward(node):
                users = [u.name for u in node.users if u.name not in self._terms]
                found[node.name] = min(self._places[node.name], *(found[u] for u in users if u in found), _FAR)
        return found


_FAR = 1 << 60  # a position behind all others


def _source(node: fx.Node) -> fx.Node:
    """Return the operation whose result a node is or is taken out of."""
    while takes_output(node):
        node = node.all_input_nodes[0]
    return node


def _sums_of_terms(joint: JointGraph) -> frozenset[str]:
    """Name the additions that only add terms of the gradient of one parameter."""
    nodes = {node.name: node for node in joint.module.graph.nodes}
    found: set[str] = set()
    pending = [nodes[name] for name, _ in joint.gradients]
    while pending:
        node = pending.pop()
        if sums_gradients(node) and len(node.users) == 1:
            found.add(node.name)
            pending.extend(node.all_input_nodes)
    return frozenset(found)


def touched_bytes(node: fx.Node, sizes: Sizes, samples: int) -> int:
    """Return the bytes that an operation reads and writes."""
    tensors = [tensor for one in [node, *node.all_input_nodes] for tensor in tensors_of(one)]
    return sum(sizes.count(tensor, samples) for tensor in tensors)


def flops_of(node: fx.Node, sizes: Sizes, samples: int) -> int:
    """Return the floating point operations of an operation; 0 if torch does not count them."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0

    def concrete(n: fx.Node) -> Any:
        return _concrete(n.meta.get("val"), sizes, samples)

    args, kwargs = fx.map_arg(node.args, concrete), fx.map_arg(node.kwargs, concrete)
    return int(count(*args, **kwargs, out_val=concrete(node)))


def _concrete(value: Any, sizes: Sizes, samples: int) -> Any:
    """Return a value with numbers for its symbolic sizes, tensors on the meta device."""
    if isinstance(value, torch.Tensor):
        return torch.empty(sizes.shape(value, samples), dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return sizes.number(value, samples)
    if isinstance(value, (tuple, list)):
        return type(value)(_concrete(item, sizes, samples) for item in value)
    return value
