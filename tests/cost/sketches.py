"""Graphs made by hand, small enough to be counted with fingers."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_pipe.core.graph import Graph, Node, Operation, Phase, Tensor

WIDTH = 8  # bytes per sample of an activation
WEIGHT = 100  # bytes of a parameter


@dataclass
class Sketch:
    """A graph under construction; tensors and operations are numbered in the order of the calls."""

    positions: int
    samples: int = 4
    operations: list[Operation] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    gradients: list[tuple[int, str]] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    updates: list[tuple[int, str]] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)

    def batch(self, name: str = "x", per_sample: float = WIDTH) -> int:
        return self._tensor(Tensor(name, -1, -1, per_sample, 0))

    def make(
        self, name: str, phase: Phase, at: int, *reads: int, size: tuple[float, int] = (WIDTH, 0), base=-1, **more
    ) -> int:
        """Add an operation with one result and return the result; keywords are those of `Operation`."""
        more.setdefault("reach", at)
        of_state = more.pop("of_state", False)
        self.operations.append(Operation(name, "aten.op", phase, at, reads=reads, view=base >= 0 or of_state, **more))
        return self._tensor(Tensor(name, len(self.operations) - 1, base, *size, of_state))

    def forward(self, name: str, at: int, *reads: int, **more) -> int:
        return self.make(name, "forward", at, *reads, **more)

    def backward(self, name: str, at: int, *reads: int, **more) -> int:
        return self.make(name, "backward", at, *reads, **more)

    def gradient(self, parameter: str, at: int, *reads: int, **more) -> int:
        """Add the operation that makes the gradient of a parameter."""
        return self.backward(f"d_{parameter}", at, *reads, size=(0, WEIGHT), **more)

    def _tensor(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def graph(self) -> Graph:
        nodes = tuple(Node(f"n{k}", "aten.op", "", "", (), (), 0, 0, 0, 0) for k in range(self.positions))
        used = {name for operation in self.operations for name in operation.parameters}
        return Graph(
            nodes,
            self.samples,
            {**dict.fromkeys(sorted(used), WEIGHT), **self.parameters},
            "sketch",
            operations=tuple(self.operations),
            tensors=tuple(self.tensors),
            gradients=tuple(self.gradients),
            results=tuple(self.results),
            updates=tuple(self.updates),
            buffer_bytes=self.buffers,
        )


def chain(length: int) -> Graph:
    """Return a chain of linear layers: h_k = h_{k-1} w_k, with both gradients of every layer but the first's input.

    Operations in order: f_0 ... f_{n-1}, loss; then for k from n-1 down to 0 the gradient of w_k and that of h_{k-1}.
    """
    sketch = Sketch(length + 1)
    activations = [sketch.batch()]
    for k in range(length):
        activations.append(sketch.forward(f"h_{k}", k, activations[-1], parameters=(f"w_{k}",)))
    loss = sketch.forward("loss", length, activations[-1], size=(0, 4))
    sketch.results.append(loss)
    gradient = sketch.backward("d_loss", length, activations[-1], reach=0)
    for k in reversed(range(length)):
        weight = sketch.gradient(f"w_{k}", k, gradient, activations[k])
        sketch.gradients.append((weight, f"w_{k}"))
        if k:
            gradient = sketch.backward(f"d_h_{k - 1}", k, gradient, parameters=(f"w_{k}",), reach=0)
    return sketch.graph()


def names(graph: Graph, operations: tuple[int, ...]) -> list[str]:
    """Return the names of operations."""
    return [graph.operations[o].name for o in operations]


def tensors(graph: Graph, found: tuple[int, ...]) -> set[str]:
    """Return the names of tensors."""
    return {graph.tensors[t].name for t in found}
