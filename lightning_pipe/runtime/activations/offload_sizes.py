"""Sizes of the pieces that a program has on the host at once, which are known before it runs.

A host allocates pinned memory for them before the program: while it runs, an allocation may wait for the whole device.
The memory of a value is that of the operation at the root of its views, in the graph of F. Stages whose operations are
not known before they run (replayed steps) have none here, and allocate when they first offload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import fx

from lightning_pipe.capture.graphs.value_sizes import TensorSpec
from lightning_pipe.capture.operators import Trait, takes_output, traits
from lightning_pipe.capture.steps.stage_program import StageProgram
from lightning_pipe.core.program import Evict, Fetch, Program


def pieces_at_once(program: Program, stages: Sequence[StageProgram], *, rank: int) -> Counter[int]:
    """Return how many pieces of each size, in bytes, a rank has on the host at once, at most.

    Args:
        program: what runs.
        stages: all stages.
        rank: the rank.
    """
    away, most = Counter[int](), Counter[int]()
    for instruction in program.ranks[rank]:
        if isinstance(instruction, Evict | Fetch):
            stage, microbatch = instruction.stage, instruction.microbatch
            replica = program.layout.stages[stage].index(rank)
            samples = program.layout.samples(stage, replica, microbatch, program.sizes[microbatch])
            pieces = _pieces(stages[stage], len(samples))
            if isinstance(instruction, Evict):
                away += pieces
                most |= away
            else:
                away -= pieces
    return most


def _pieces(stage: StageProgram, samples: int) -> Counter[int]:
    """Return the sizes of the memories that a stage offloads of a micro-batch."""
    if (code := stage.forward.code) is None or not stage.offloaded:
        return Counter()
    *nodes, output = code.module.graph.nodes
    values: Any = output.args[0]
    known = {node.name: node for node in nodes if node.op == "placeholder"}
    known |= {name: value for name, value in zip(stage.forward.outputs, values, strict=True) if name in stage.offloaded}
    roots = {_root(known[name]) for name in stage.offloaded & known.keys()}
    forms = (code.form(root, samples) for root in roots if root.name not in stage.parameters)
    return Counter(_bytes(form) for form in forms if isinstance(form, TensorSpec))


def _root(node: fx.Node) -> fx.Node:
    """Return the node whose memory a value lies in."""
    while Trait.VIEW in traits(source := node.all_input_nodes[0] if takes_output(node) else node):
        node = source.all_input_nodes[0]
    return node


def _bytes(form: TensorSpec) -> int:
    steps = zip(form.shape, form.stride, strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return (1 + last) * form.dtype.itemsize if all(form.shape) else 0
