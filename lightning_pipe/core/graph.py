"""What does a planner know about a captured step? Its forward nodes in order, with costs, bytes and parameters.

The backward of a node belongs to the stage of the node, so planners cut the forward order only: a cut at position k
puts nodes 0..k-1 before and k.. after.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """One forward operation.

    Attributes:
        name: unique name in the graph, e.g. `addmm_3`.
        op: operator, e.g. `aten.addmm.default`.
        module: path of the module in whose call it runs, e.g. `model.blocks.3.mlp`; "" for the step itself.
        line: user line, e.g. `train.py:41 in training_step`; "" if unknown.
        inputs: names of the nodes and batch leaves it reads.
        parameters: names of the parameters it reads.
        output_bytes: bytes of its output for the captured samples.
        flops: floating point operations of forward for the captured samples (0 where none are counted).
        backward_flops: the same for its backward nodes.
        touched_bytes: bytes read and written, forward and backward.
    """

    name: str
    op: str
    module: str
    line: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    output_bytes: int
    flops: int
    backward_flops: int
    touched_bytes: int


@dataclass(frozen=True)
class Graph:
    """Forward nodes in execution order.

    Attributes:
        nodes: the nodes; a cut position is an index into them.
        samples: samples of the batch that was captured.
        parameter_bytes: bytes of every parameter by name (tied parameters under one name).
        fingerprint: hash of the graph, equal on all ranks and in every process for the same step.
        coupled: names of nodes that mix samples (batch statistics), which slicing would change.
        uncuttable: positions at which the graph cannot be cut, because state that the step overwrites is read before
            and written after.
        unsliceable: positions at which a value crosses whose samples do not lie in rows of their own, so that stages
            with different numbers of replicas cannot meet there.
    """

    nodes: tuple[Node, ...]
    samples: int
    parameter_bytes: dict[str, int]
    fingerprint: str
    coupled: tuple[str, ...] = ()
    uncuttable: frozenset[int] = frozenset()
    unsliceable: frozenset[int] = frozenset()

    def position(self, at: str) -> int:
        """Return the position of a node, or of the first node inside a module; -1 if neither exists."""
        if not at:
            return 0
        for position, node in enumerate(self.nodes):
            if node.name == at or node.module == at or node.module.startswith(at + "."):
                return position
        return -1
