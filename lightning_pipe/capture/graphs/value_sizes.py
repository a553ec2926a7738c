"""Sizes of the values of a joint graph, as functions of the number of samples.

Sizes are taken at two numbers of samples and read as a straight line. A size that is none (every sample meets every
other) is taken to be in proportion to the samples, from the captured number on. In a graph of constant size, which says
nothing about samples, so is every value that depends on the batch, except for gradients of parameters and single
numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph

_PROBES = 1024, 2048  # numbers of samples at which sizes are taken


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its content.

    Attributes:
        dtype, shape, stride: its form.
        name: name in the graph, "" if it has none of its own; no part of what makes specs equal.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    name: str = field(default="", repr=False, compare=False)


def is_size(node: fx.Node) -> bool:
    """Return whether a node computes a size: a symbol, or a number where sizes are constants of the graph."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float))


class Sizes:
    """Sizes of the values of one joint graph."""

    def __init__(self, joint: JointGraph) -> None:
        self._joint = joint
        self._known: dict[tuple[sympy.Basic, int], Any] = {}
        self._varying = _varying(joint) if joint.symbol is None else frozenset()

    def number(self, size: Any, samples: int) -> Any:
        """Return a size, which may be an expression over the samples, at a number of samples."""
        if isinstance(size, int | float):
            return size
        expression = size.node.expr
        if (expression, samples) not in self._known:
            value = self._joint.at(expression, samples)
            self._known[expression, samples] = int(value) if value.is_Integer else float(value)
        return self._known[expression, samples]

    def shape(self, tensor: torch.Tensor, samples: int) -> tuple[int, ...]:
        """Return the shape of a value at a number of samples."""
        return tuple(self.number(size, samples) for size in tensor.shape)

    def stride(self, tensor: torch.Tensor, samples: int) -> tuple[int, ...]:
        """Return the strides of a value at a number of samples."""
        return tuple(self.number(size, samples) for size in tensor.stride())

    def form(self, node: fx.Node, samples: int) -> Any:
        """Return the value of a node at a number of samples, with specs in the place of its tensors."""
        own = getattr(self._joint.module, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
        return self._form(own, samples, node.name)

    def _form(self, value: Any, samples: int, name: str = "") -> Any:
        if isinstance(value, torch.Tensor):
            return TensorSpec(value.dtype, self.shape(value, samples), self.stride(value, samples), name)
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return self.number(value, samples)
        if isinstance(value, (tuple, list)):
            return type(value)(self._form(item, samples) for item in value)
        return value

    def count(self, tensor: torch.Tensor, samples: int) -> int:
        """Return the bytes of a value at a number of samples."""
        return math.prod(self.shape(tensor, samples)) * tensor.element_size()

    def line(self, node: fx.Node) -> tuple[float, int]:
        """Return (bytes per sample, bytes besides) of a tensor node; the bytes of a number are fixed."""
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return 0.0, _NUMBER_BYTES
        samples = self._joint.samples
        captured = self.count(value, samples)
        if node.name in self._varying:
            return captured / samples, 0
        few, many = (self.count(value, probe) for probe in _PROBES)
        per_sample = (many - few) / (_PROBES[1] - _PROBES[0])
        fixed = few - round(per_sample * _PROBES[0])
        return (per_sample, fixed) if round(per_sample * samples) + fixed == captured else (captured / samples, 0)


_NUMBER_BYTES = 8


def _varying(joint: JointGraph) -> frozenset[str]:
    """Name the values that depend on the batch, except for gradients of parameters and single numbers."""
    found = {*joint.leaves, *joint.tangents}
    for node in joint.module.graph.nodes:
        if node.op == "call_function" and any(n.name in found for n in node.all_input_nodes):
            found.add(node.name)
    values = {node.name: node.meta.get("val") for node in joint.module.graph.nodes}
    single = {name for name in found if isinstance(values[name], torch.Tensor) and values[name].numel() <= 1}
    return frozenset(found - {name for name, _ in joint.gradients} - single)
