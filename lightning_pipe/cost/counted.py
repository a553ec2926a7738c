"""How long would every operation take on a nominal device? A profile without measurement.

    seconds = overhead + flops / rate + bytes touched / bandwidth

The two are added, not overlapped as in the roofline model (Williams, Waterman and Patterson, 2009), so no operation is
cheaper than either; a view takes no time. Flops are taken in proportion to the samples where the operation touches
samples at all, bytes as the sizes of what it reads and makes say. The nominal device is one core of a present CPU.
Between operators of equal counts real devices differ by factors: good for balance, not for prediction.
"""

from __future__ import annotations

from lightning_pipe.core.graph import Graph, Operation
from lightning_pipe.core.profile import Profile

BYTES_PER_S = 10e9  # memory bandwidth that one core reaches
FLOPS_PER_BYTE = 10.0  # balance of a nominal device; present CPUs have 5-20, GPUs about 100
OPERATION_S = 5e-6  # dispatch of one operation in eager mode


def counted(graph: Graph) -> Profile:
    """Return the profile of a graph on the nominal device."""
    sizes = (1, max(2, graph.samples))  # two points make the line that the formula is
    makes: list[list[int]] = [[] for _ in graph.operations]
    for t, tensor in enumerate(graph.tensors):
        if tensor.maker >= 0:
            makes[tensor.maker].append(t)
    seconds = tuple(
        tuple(_seconds(operation, graph, made, samples) for samples in sizes)
        for operation, made in zip(graph.operations, makes, strict=True)
    )
    return Profile(graph.fingerprint, "nominal", sizes, seconds, source="counted")


def _seconds(operation: Operation, graph: Graph, made: list[int], samples: int) -> float:
    if operation.view:
        return 0.0
    per_sample = sum(graph.tensors[t].bytes_per_sample for t in (*operation.reads, *made))
    touched = max(0.0, operation.touched_bytes + per_sample * (samples - graph.samples))
    flops = operation.flops * (samples / graph.samples if per_sample else 1.0)
    return OPERATION_S + (flops / FLOPS_PER_BYTE + touched) / BYTES_PER_S
