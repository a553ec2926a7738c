"""How values of micro-batches make those of a batch, and where their samples lie."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.steps.stage_program import Combine, Value, memory_order

BATCH_STATISTICS = "batch statistics"
UNKNOWN_MIXING = "may look at other samples"


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
        combine: how values of micro-batches make that of the batch.
        samples: where samples lie; absent where they do not, or not in consecutive rows.
        coupled: nodes that mix samples, with the reason.
        loss: of the loss.
    """

    combine: Mapping[str, Combine]
    samples: Mapping[str, SampleRows]
    coupled: Mapping[str, str]
    loss: Combine


def value(node: fx.Node, joint: JointGraph, flow: Flow) -> Value:
    """Describe a value that leaves its stage."""
    meta = node.meta["val"]
    rows = flow.samples.get(node.name)
    return Value(
        name=node.name,
        dtype=meta.dtype if isinstance(meta, torch.Tensor) else None,
        size=size_function(meta, joint),
        size_in_batch=_size_in_batch(meta, joint),
        batch_dim=rows.dim if rows else None,
        rows=rows.rows if rows else 1,
        outer=rows.outer if rows else 1,
        combine=flow.combine[node.name],
        order=_memory_order(meta, joint),
    )


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


def _depends(size: Any, joint: JointGraph) -> bool:
    return joint.symbol is not None and isinstance(size, torch.SymInt) and joint.symbol in size.node.expr.free_symbols


def dims_with_samples(value: Any, joint: JointGraph) -> list[int]:
    """List the dimensions of a traced value whose size depends on the number of samples; none if it is no tensor."""
    shape = value.shape if isinstance(value, torch.Tensor) else ()
    return [d for d, size in enumerate(shape) if _depends(size, joint)]


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
