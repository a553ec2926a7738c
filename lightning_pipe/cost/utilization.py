"""Model FLOPs utilization (MFU): how much of what its devices could do at their peak a step does.

Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022, appendix B), with the peak of the type of
numbers of each operation. What is recomputed does not count.

    seconds of a device alone at its peak = flops of the model x sum over types (share of the type / its peak)
    seconds of all devices at their peak  = 1 / (sum over devices of 1 / seconds of the device alone)
    MFU                                   = seconds of all devices at their peak / seconds of the step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from lightning_pipe.core.graph import Graph

Peak: TypeAlias = Callable[[str], float]
"""Return a device's floating point operations per second with numbers of a type; 0 if they are not known."""


def model_flops(graph: Graph, samples: int) -> float:
    """Return the floating point operations of forward and backward for this many samples; 0 if none are counted."""
    flops: float = sum(node.flops + node.backward_flops for node in graph.nodes)
    return flops * samples / graph.samples


def seconds_at_peak(graph: Graph, samples: int, peaks: Sequence[Peak]) -> float:
    """Return the seconds of all devices at their peak for this many samples; 0 if operations or a peak are not known.

    Args:
        graph: of the step.
        samples: of a batch.
        peaks: of every device.
    """
    flops, shares = model_flops(graph, samples), _types(graph)
    if not flops or not all(peak(dtype) for peak in peaks for dtype in shares):
        return 0.0
    alone_s = [flops * sum(share / peak(dtype) for dtype, share in shares.items()) for peak in peaks]
    return 1 / sum(1 / seconds for seconds in alone_s)


def _types(graph: Graph) -> dict[str, float]:
    """Return the share of each type of numbers in the floating point operations."""
    flops: Counter[str] = Counter()
    for operation in graph.operations:
        flops[operation.dtype] += operation.flops
    total = flops.total()
    return {dtype: count / total for dtype, count in flops.items() if count} if total else {"": 1.0}
