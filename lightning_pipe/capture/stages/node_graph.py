"""Graph of the forward operations of a joint graph for planners, with what each costs forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from lightning_pipe.capture.graphs.fingerprint import fingerprint, spelled
from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.sample_flow import BATCH_STATISTICS, Flow
from lightning_pipe.capture.graphs.value_sizes import Sizes
from lightning_pipe.capture.stages.assign import Kinds, uncuttable, unsliceable
from lightning_pipe.capture.stages.batched_weight_grad import joining
from lightning_pipe.capture.stages.operations import operations_of, tensors_of
from lightning_pipe.core.graph import Graph, HeadWork, Node, Operation, Tensor


def graph_of_nodes(
    joint: JointGraph, kinds: Kinds, flow: Flow, aliases: dict[str, str], head: HeadWork | None = None
) -> Graph:
    """Return a joint graph as planners see it.

    Args:
        joint: the graph.
        kinds: its nodes by kind.
        flow: where its samples are.
        aliases: canonical names of the parameters by all names.
        head: what runs once per batch; what it reads and makes is found here.
    """
    nodes = {node.name: node for node in joint.module.graph.nodes}
    described = operations_of(joint, kinds, aliases, joining(joint, kinds, flow))
    costs = _costs(described.operations, len(kinds.placed))
    placed = zip(kinds.placed, costs, strict=True)
    parameter_bytes = {aliases[f]: _bytes(nodes[n]) for n, f in joint.parameters.items()}
    sizes = Sizes(joint)
    described_nodes = tuple(_node(nodes[name], joint, kinds, cost, aliases, sizes) for name, cost in placed)
    statistics = (node for node in described_nodes if flow.coupled.get(node.name) == BATCH_STATISTICS)
    return Graph(
        nodes=described_nodes,
        samples=joint.samples,
        parameter_bytes=parameter_bytes,
        fingerprint=fingerprint(joint),
        coupled=tuple(flow.coupled),
        by_microbatch=tuple(dict.fromkeys(node.module or node.op for node in statistics)),
        uncuttable=uncuttable(joint, kinds),
        unsliceable=unsliceable(joint, kinds, flow),
        operations=described.operations,
        tensors=described.tensors,
        gradients=described.gradients,
        results=described.results,
        updates=described.updates,
        buffer_bytes={f: _bytes(nodes[n]) for n, f in joint.buffers.items()},
        head=None if head is None else _with_tensors(head, joint, described.tensors),
    )


def _with_tensors(head: HeadWork, joint: JointGraph, tensors: Sequence[Tensor]) -> HeadWork:
    """Return a head with the tensors that it reads and makes, and the bytes of those that it reads."""
    assert joint.head is not None, "a step with work for a head has a head"
    reads, makes = (
        tuple(t for t, tensor in enumerate(tensors) if tensor.name in names)
        for names in (joint.head.inputs, joint.head.outputs)
    )
    per_sample = float(sum(tensors[t].bytes_per_sample for t in reads))
    fixed = sum(tensors[t].fixed_bytes for t in reads)
    return replace(head, bytes_per_sample=per_sample, fixed_bytes=fixed, reads=reads, makes=makes)


@dataclass
class _Cost:
    """Counted costs of a node and of the backward operations that go with it."""

    flops: int = 0
    backward_flops: int = 0
    touched_bytes: int = 0


def _costs(operations: Iterable[Operation], positions: int) -> list[_Cost]:
    costs = [_Cost() for _ in range(positions)]
    for operation in operations:
        if operation.phase == "repeated":
            continue
        cost = costs[max(0, operation.at)]
        cost.touched_bytes += operation.touched_bytes
        if operation.phase == "backward":
            cost.backward_flops += operation.flops
        else:
            cost.flops += operation.flops
    return costs


def _node(node: fx.Node, joint: JointGraph, kinds: Kinds, cost: _Cost, aliases: dict[str, str], sizes: Sizes) -> Node:
    custom: dict[str, str] = node.meta.get("custom") or {}
    inputs = [kinds.parents.get(n.name, n.name) for n in node.all_input_nodes]
    return Node(
        name=node.name,
        op=spelled(node.target),
        module=custom.get("module", ""),
        line=custom.get("line", ""),
        inputs=tuple(dict.fromkeys(n for n in inputs if n in kinds.placed or n in joint.leaves)),
        parameters=tuple(sorted({aliases[name] for name in _parameters(node, joint, kinds)})),
        output_bytes=sum(sizes.count(tensor, joint.samples) for tensor in tensors_of(node)),
        flops=cost.flops,
        backward_flops=cost.backward_flops,
        touched_bytes=cost.touched_bytes,
    )


def _parameters(node: fx.Node, joint: JointGraph, kinds: Kinds) -> set[str]:
    found: set[str] = set()
    for source in node.all_input_nodes:
        if source.name in joint.parameters:
            found.add(joint.parameters[source.name])
        elif source.name in kinds.repeated:
            found |= _parameters(source, joint, kinds)
    return found


def _bytes(node: fx.Node) -> int:
    tensor = node.meta["val"]
    return int(tensor.numel() * tensor.element_size())
