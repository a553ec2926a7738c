"""Graph of units for planners, in the form of published layers with the module's own parameter names."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.recording.units import Unit, UnitOutput, UnitTrace
from lightning_pipe.capture.replayed.replay_needs import readers_of, uncuttable
from lightning_pipe.core.graph import CALL, Graph
from lightning_pipe.profiles.published_graph import graph_of
from lightning_pipe.profiles.published_layers import Layers

_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def bytes_of(output: UnitOutput) -> int:
    """Return the bytes of an output in the traced run."""
    return torch.Size(output.shape).numel() * output.dtype.itemsize


def graph_of_units(layers: Layers, trace: UnitTrace, names: tuple[str, ...], request: Request) -> Graph:
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
        for p in range(k + 1, max(readers_of(trace, k), default=k) + 1)
    )
    sizes = {**graph.parameter_bytes, **real}
    return replace(
        graph,
        nodes=nodes,
        operations=operations,
        parameter_bytes=sizes,
        coupled=tuple(names),  # glue runs in several stages, which must see the same samples
        uncuttable=frozenset() if trace.loss is None else uncuttable(trace),  # cuts of an evaluation are moved
        unsliceable=unsliceable,
    )


def _operator(request: Request, unit: Unit) -> str:
    """Name what mixes samples for certain; of other calls it is not known."""
    inside = request.module.get_submodule(unit.path).modules()
    mixing = (type(module).__name__ for module in inside if isinstance(module, _STATISTICS) and module.training)
    return next(mixing, CALL)


def _counted(operation: Any, units: dict[str, Unit]) -> Any:
    backward = operation.phase == "backward"
    unit = units[operation.name.removesuffix(".backward") if backward else operation.name]
    return replace(operation, flops=unit.flops * (2 if backward else 1))
