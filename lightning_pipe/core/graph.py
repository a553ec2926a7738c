"""Graph of a captured step as planners see it: forward nodes in order, with costs, bytes and parameters.

The backward of a node belongs to the stage of the node, so planners cut the forward order only: a cut at position k
puts nodes 0..k-1 before and k.. after. `Node` is what people see and cuts name; `Operation` and `Tensor` are what costs
are made of: every operation of forward and backward, and every tensor that one makes and another reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Phase = Literal["forward", "backward", "repeated"]
CALL = "call"  # operator of a node whose inside is not known: the call of a module


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
class Operation:
    """One operation of the step, as costs see it.

    A `repeated` operation (a view or cast of a parameter, a mask, a size) has no stage: every compute that reads its
    result, or the result of another that does, runs it for itself.

    Attributes:
        name: unique name in the graph.
        op: operator, e.g. `aten.addmm.default`.
        phase: where it runs.
        at: position that decides its stage: its own for a forward operation, for a backward operation that of the
            forward node whose gradient it computes (never after a gradient that it reads); -1 goes to stage 0.
        reach: smallest `at` to which its result flows. In a stage that begins at `a`, a backward operation belongs to
            the input half (I) if `reach < a`, otherwise to the weight half (W).
        reads: indices of the tensors that it reads.
        parameters: canonical names of the parameters that it reads itself.
        buffers: names of the buffers that it reads itself.
        adds_terms: whether it only adds terms of the gradient of one parameter: where its terms are made in several
            stages it is not run at all, every stage keeps its own term until the step.
        view: whether its result is a view of its input, so that it moves no data.
        flops: floating point operations for the captured samples (0 where none are counted).
        touched_bytes: bytes read and written for the captured samples.
        joinable: whether a weight half with it can run once on the samples of several micro-batches.
        dtype: type of the numbers that it makes, e.g. `bfloat16`; "" if it is not known.
        checkpoint: number of the call of `torch.utils.checkpoint.checkpoint` in which it runs, or, of a backward
            operation, the one that it differentiates; -1 if in none.
    """

    name: str
    op: str
    phase: Phase
    at: int
    reach: int
    reads: tuple[int, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    adds_terms: bool = False
    view: bool = False
    flops: int = 0
    touched_bytes: int = 0
    joinable: bool = False
    dtype: str = ""
    checkpoint: int = -1


@dataclass(frozen=True)
class Tensor:
    """One tensor that an operation or the head makes, or a field of the batch.

    Attributes:
        name: unique name in the graph.
        maker: index of the operation that makes it; -1 for a field of the batch, which stage 0 loads, and for what the
            head makes (`HeadWork.makes`).
        base: index of the tensor of which it is a view, -1 if it has memory of its own. Where both are in one stage
            they share memory; a view that travels to another stage arrives with memory of its own.
        bytes_per_sample: bytes that every sample adds.
        fixed_bytes: bytes that do not depend on the samples.
        of_state: whether it is a view of a parameter, a buffer or a constant, which has the memory where it is made.
        joinable: whether the tensors of several micro-batches can be put together to that of all their samples (one
            after the other, or the same for all).
    """

    name: str
    maker: int
    base: int
    bytes_per_sample: float
    fixed_bytes: int
    of_state: bool = False
    joinable: bool = False

    def size(self, samples: int) -> int:
        """Return the bytes for this many samples."""
        return round(self.bytes_per_sample * samples) + self.fixed_bytes


@dataclass(frozen=True)
class HeadWork:
    """What of a step runs once per batch, because it needs all samples.

    Attributes:
        line: user line of the first operation that needs them, e.g. `train.py:41 in training_step`; "" if unknown.
        op: this operation, e.g. `aten.logsumexp.default`.
        bytes_per_sample: bytes that are put together, of what has samples.
        fixed_bytes: bytes of what every micro-batch has one value of.
        reads: the tensors of the graph that are put together; () if the graph has not all of them.
        makes: the tensors of the graph that it makes, on the last stage; () likewise.
        samples: of the batch that the following are for.
        operations: their number.
        flops: floating point operations.
        touched_bytes: bytes read and written.
        workspace_bytes: of what it makes, at most at once.
        holds_backwards: whether gradients need it; else results only.
    """

    line: str
    op: str
    bytes_per_sample: float = 0.0
    fixed_bytes: int = 0
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    samples: int = 1
    operations: int = 1
    flops: int = 0
    touched_bytes: int = 0
    workspace_bytes: int = 0
    holds_backwards: bool = True

    def size(self, samples: int) -> int:
        """Return the bytes that are put together of a batch of this many samples."""
        return round(self.bytes_per_sample * samples) + self.fixed_bytes


@dataclass(frozen=True)
class Graph:
    """Forward nodes in execution order.

    Attributes:
        nodes: the nodes; a cut position is an index into them.
        samples: samples of the batch that was captured.
        parameter_bytes: bytes of every parameter by name (tied parameters under one name).
        fingerprint: hash of the graph, equal on all ranks and in every process for the same step.
        coupled: names of nodes that mix samples (batch statistics), or may, which slicing would change.
        by_microbatch: what takes the samples of a micro-batch where one device takes those of the batch: modules with
            batch statistics, say. Where there is any, the number of micro-batches changes what is trained.
        uncuttable: positions at which the graph cannot be cut, and in words what would have to cross them: state that
            the step overwrites, or a value that cannot travel, with the user's line where it is known.
        unsliceable: positions at which a value crosses whose samples do not lie in rows of their own, so that stages
            with different numbers of replicas cannot meet there.
        operations: all operations of the step, in the order of the joint graph (forward, then backward).
        tensors: all tensors of the step.
        gradients: (tensor, canonical name of the parameter) of every gradient of a parameter.
        results: tensors that the step hands out: loss, logged values, arguments of metrics.
        updates: (tensor, name) of the new content of every buffer (or parameter) that the step overwrites.
        buffer_bytes: bytes of every buffer that the step reads, by name.
        lasting: tensors that cannot be recomputed, whatever makes them.
        head: what runs once per batch on the last stage; None if no micro-batch needs the others.
    """

    nodes: tuple[Node, ...]
    samples: int
    parameter_bytes: dict[str, int]
    fingerprint: str
    coupled: tuple[str, ...] = ()
    by_microbatch: tuple[str, ...] = ()
    uncuttable: Mapping[int, str] = field(default_factory=dict)
    unsliceable: frozenset[int] = frozenset()
    operations: tuple[Operation, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    gradients: tuple[tuple[int, str], ...] = ()
    results: tuple[int, ...] = ()
    updates: tuple[tuple[int, str], ...] = ()
    buffer_bytes: dict[str, int] = field(default_factory=dict)
    lasting: frozenset[int] = frozenset()
    head: HeadWork | None = None

    @property
    def head_reads(self) -> tuple[int, ...]:
        """Return the tensors that the head reads; none if there is no head, or the graph has not all of them."""
        return () if self.head is None else self.head.reads

    @property
    def head_makes(self) -> tuple[int, ...]:
        """Return the tensors that the head makes; none likewise."""
        return () if self.head is None else self.head.makes

    @cached_property
    def has_checkpoints(self) -> bool:
        """Return whether some operation runs in a call of `torch.utils.checkpoint.checkpoint`."""
        return any(operation.checkpoint >= 0 for operation in self.operations)

    def position(self, at: str) -> int:
        """Return the position of a node, or of the first node inside a module; -1 if neither exists."""
        if not at:
            return 0
        for position, node in enumerate(self.nodes):
            if node.name == at or node.module == at or node.module.startswith(at + "."):
                return position
        return -1
