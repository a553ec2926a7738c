"""Graph of units for planners, in the form of published layers with the module's own parameter names."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import torch

from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.recording.unit_inputs import STATISTICS, by_microbatch
from lightning_pipe.capture.recording.units import Unit, UnitOutput, UnitTrace
from lightning_pipe.capture.replayed.replay_needs import compared_units, head_needs, readers_of
from lightning_pipe.capture.replayed.replay_values import leaf_size
from lightning_pipe.core.graph import CALL, Graph, HeadWork, Operation, Tensor
from lightning_pipe.profiles.published_graph import graph_of, stash_of
from lightning_pipe.profiles.published_layers import Layers

ASKED_BYTES = 16.0  # of a sample: the sums of its rows, and how large they are


def bytes_of(output: UnitOutput) -> int:
    """Return the bytes of an output in the traced run."""
    return torch.Size(output.shape).numel() * output.dtype.itemsize


def graph_of_units(
    layers: Layers, trace: UnitTrace, names: tuple[str, ...], request: Request, *, uncuttable: dict[int, str]
) -> Graph:
    """Return the graph of layers with the names of real parameters, and what is known of cuts."""
    described = repr((names, trace.samples, [(u.path, sorted(u.reads), u.outputs) for u in trace.units]))
    fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]
    graph = graph_of(layers, fingerprint=fingerprint)
    real = {name: request.module.get_parameter(name).nbytes for unit in trace.units for name in unit.parameters}
    nodes = tuple(
        replace(node, op=_operator(request, unit), module=unit.path, parameters=unit.parameters, flops=unit.flops)
        for node, unit in zip(graph.nodes, trace.units, strict=True)
    )
    by_name = {node.name: unit for node, unit in zip(graph.nodes, trace.units, strict=True)}
    operations = tuple(_counted(operation, by_name) for operation in graph.operations)
    unsliceable = frozenset(
        p
        for k, unit in enumerate(trace.units)
        if any(output.batch_dim is None for output in unit.outputs)
        for p in range(k + 1, max(readers_of(trace, ("unit", k)), default=k) + 1)
    )
    tensors, operations = _with_leaves(graph.tensors, operations, trace, request)
    sizes = {**graph.parameter_bytes, **real}
    repeatable = {stash_of(name) for name, unit in by_name.items() if unit.is_repeatable}
    return replace(
        graph,
        nodes=nodes,
        operations=operations,
        tensors=tensors,
        parameter_bytes=sizes,
        by_microbatch=() if trace.whole else by_microbatch(request, trace),
        coupled=tuple(names),  # glue runs in several stages, which must see the same samples
        uncuttable={} if trace.loss is None else uncuttable,  # cuts of an evaluation are moved
        unsliceable=unsliceable,
        lasting=frozenset(t for t, tensor in enumerate(tensors) if tensor.name not in repeatable),
        head=_head_work(trace, request),
    )


def _head_work(trace: UnitTrace, request: Request) -> HeadWork | None:
    """Return what runs once per batch: all that lies behind the last unit."""
    if not trace.head:
        return None
    outputs = (output for k in head_needs(trace, ()).units for output in trace.units[k].outputs)
    op = f"{'the loss' if trace.head == 'holds' else 'what is said'} of {request.method}"
    together = sum(map(bytes_of, outputs)) / trace.samples
    return HeadWork("", op, together, holds_backwards=trace.head == "holds")


def _with_leaves(
    tensors: tuple[Tensor, ...], operations: tuple[Operation, ...], trace: UnitTrace, request: Request
) -> tuple[tuple[Tensor, ...], tuple[Operation, ...]]:
    """Add the tensors of the batch, which are read, and kept for the backward, as outputs of units are.

    What a head compares travels to the last unit, whose stage it is on.
    """
    sizes = leaf_sizes(trace, request)
    asked = compared_units(trace, sizes) if trace.head else ()
    compared = head_needs(trace, asked).leaves if trace.head else ()
    count, found, reads = len(trace.units), [*tensors], [[*operation.reads] for operation in operations]
    for number, leaf in enumerate(request.structure.leaves):
        along = request.batch_dim if request.samples is not None and len(leaf.shape) > request.batch_dim else None
        size = math.prod(leaf_size(leaf, 1, along)) * leaf.dtype.itemsize
        per_sample, fixed = (0.0, size) if along is None else (float(size), 0)
        for reader in readers_of(trace, ("leaf", number)):
            for operation in (reader, 2 * count - 1 - reader):
                if operation == reader or reads[operation]:
                    reads[operation].append(len(found))
        if number in compared and count - 1 not in readers_of(trace, ("leaf", number)):
            reads[count - 1].append(len(found))
        found.append(Tensor(f"leaf{number}", -1, -1, per_sample, fixed))
    for k in (k for k in asked if k < count - 1):
        reads[count - 1].append(len(found))
        found.append(Tensor(f"asked{k}", k, -1, ASKED_BYTES, 0))
    return tuple(found), tuple(replace(o, reads=tuple(r)) for o, r in zip(operations, reads, strict=True))


def leaf_sizes(trace: UnitTrace, request: Request) -> list[float]:
    """Return how many numbers the tensors of the batch have by sample."""
    dim = request.batch_dim if request.samples is not None else None
    return [math.prod(leaf_size(leaf, trace.samples, dim)) / trace.samples for leaf in request.structure.leaves]


def _operator(request: Request, unit: Unit) -> str:
    """Name what mixes samples for certain; of other calls it is not known."""
    inside = request.module.get_submodule(unit.path).modules()
    mixing = (type(module).__name__ for module in inside if isinstance(module, STATISTICS) and module.training)
    return next(mixing, CALL)


def _counted(operation: Operation, units: dict[str, Unit]) -> Operation:
    backward = operation.phase == "backward"
    unit = units[operation.name.removesuffix(".backward") if backward else operation.name]
    return replace(operation, flops=unit.flops * (2 if backward else 1))
