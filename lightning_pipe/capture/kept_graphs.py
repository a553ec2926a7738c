"""Graphs kept on disk: what tracing a step has given, for a later process that sees the same step (`kept_traces`).

One file holds one graph, as JSON. Its operations are those of torch by name, expressions over symbolic sizes are rows
of names and numbers (`kept_expressions`), and texts that become code are names of Python. So a file can hold no code.
Graphs with constants, or anything that has no name, are not kept. Damage is found, and room kept, by `cache_files`.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn

from lightning_pipe import cache_files
from lightning_pipe.capture import torch_private as private
from lightning_pipe.capture.kept_expressions import ExpressionRows, UnknownExpression, expressions_of

_FORMAT = 1  # raised when what is written changes
_MOST_BYTES = 1 << 30  # of all graphs of a folder: some hundreds of large models
_ADDED = "Gradient addition"  # torch's own mark on additions of gradients, in a stack trace
_SIMPLE = (bool, int, float, str, type(None))
_OPERATORS = (
    "add sub mul truediv floordiv mod pow neg pos abs invert and_ or_ xor not_ eq ne lt le gt ge lshift rshift getitem"
).split()
_FUNCTIONS: Mapping[tuple[str, str], Any] = {
    **{("_operator", name): getattr(operator, name) for name in _OPERATORS},
    **{("math", name): function for name, function in vars(math).items() if callable(function) and name[0] != "_"},
    **{("torch", name): function for name, function in vars(torch).items() if name.startswith("sym_")},
}  # of symbolic sizes; each is a function of numbers
_NAMED_KINDS = (torch.dtype, torch.layout, torch.memory_format)
_NAMED: Mapping[str, Any] = {str(value): value for value in vars(torch).values() if isinstance(value, _NAMED_KINDS)}


class NotKept(Exception):
    """A graph has something that cannot be kept; the text says what."""


@dataclass(frozen=True)
class KeptGraph:
    """A traced graph without its module, as JSON has it; `record`, guards and calls belong to a process.

    Attributes:
        nodes: one row per node.
        expressions: one row per expression.
        fields: of `JointGraph`, by name.
        fingerprint: of the graph.
    """

    nodes: list[Any]
    expressions: list[Any]
    fields: Any
    fingerprint: str


def path_of(folder: Path, key: str) -> Path:
    """Return the file of a graph."""
    return folder / f"{key}.graph"


def store(folder: Path, key: str, kept: KeptGraph) -> None:
    """Keep a graph."""
    content = json.dumps(asdict(kept), separators=(",", ":")).encode()
    cache_files.write(path_of(folder, key), content, version=_FORMAT, most_bytes=_MOST_BYTES)


def load(folder: Path, key: str) -> KeptGraph | None:
    """Return a kept graph; None where there is none, or one that cannot be used."""
    return cache_files.read(path_of(folder, key), lambda text: KeptGraph(**json.loads(text)), version=_FORMAT)


def kept_graph(graph: fx.Graph, fields: Mapping[str, Any], fingerprint: str) -> KeptGraph:
    """Return a graph as it is kept.

    Raises:
        NotKept: if it has something that has no name.
    """
    writer = _Writer()
    nodes = [writer.row(node) for node in graph.nodes]
    return KeptGraph(nodes, writer.expressions.rows, writer.plain(dict(fields)), fingerprint)


class _Writer:
    """Plain values of JSON: a scalar is itself, all else a list of its kind and its content."""

    def __init__(self) -> None:
        self.expressions = ExpressionRows()

    def row(self, node: fx.Node) -> list[Any]:
        """Return a node."""
        if node.op not in ("placeholder", "call_function", "output"):
            raise NotKept(f"{node.name} is a constant")
        target = _target(node.target) if node.op == "call_function" else str(node.target)
        known: dict[str, Any] = {
            key: node.meta[key] for key in ("custom", "seq_nr", "partitioner_tag") if key in node.meta
        }
        if _ADDED in (node.meta.get("stack_trace") or ""):
            known["stack_trace"] = _ADDED
        value = [self.value(node.meta["val"])] if "val" in node.meta else []
        return [node.op, node.name, target, self.plain(node.args), self.plain(node.kwargs), value, self.plain(known)]

    def plain(self, value: Any) -> Any:
        """Return an argument, or a field of a joint graph."""
        if type(value) in _SIMPLE:
            return value
        match value:
            case fx.Node():
                return ["node", value.name]
            case tuple() | list():
                return ["tuple" if isinstance(value, tuple) else "list", [self.plain(item) for item in value]]
            case Mapping():
                return ["dict", [[self.plain(key), self.plain(item)] for key, item in value.items()]]
            case slice():
                return ["slice", [self.plain(item) for item in (value.start, value.stop, value.step)]]
            case complex():
                return ["complex", [value.real, value.imag]]
            case torch.device():
                return ["device", str(value)]
            case sympy.Basic():
                return ["expression", self._number(value)]
        if isinstance(value, _NAMED_KINDS):
            return ["torch", str(value)]
        raise NotKept(f"an argument is a {type(value).__name__}")

    def value(self, value: Any) -> Any:
        """Return what is known of the value of a node."""
        if type(value) in _SIMPLE or type(value) is complex:
            return self.plain(value)
        if isinstance(value, (tuple, list)):
            return ["tuple" if isinstance(value, tuple) else "list", [self.value(item) for item in value]]
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self._size(value)
        if not isinstance(value, private.FakeTensor) or value.layout is not torch.strided:
            raise NotKept(f"a value is a {type(value).__name__}")
        sizes = [[self._size(size) for size in sizes] for sizes in (value.shape, value.stride())]
        return ["tensor", [*sizes, str(value.dtype), str(value.device)]]

    def _size(self, size: Any) -> Any:
        if isinstance(size, int):
            return size
        kind = "int" if isinstance(size, torch.SymInt) else "float"
        return [kind, [self._number(size.node.expr), size.node.hint]]

    def _number(self, expression: sympy.Basic) -> int:
        try:
            return self.expressions.number(expression)
        except UnknownExpression as error:
            raise NotKept(str(error)) from None


def _target(target: Any) -> list[str]:
    if isinstance(target, private.OpOverload):
        return ["op", str(target)]
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if _FUNCTIONS.get((module, name)) is target:
        return [module, name]
    raise NotKept(f"{target} has no name")


def _function(target: list[str]) -> Any:
    """Return a function of numbers, or an operator of torch that opens no file.

    Raises:
        KeyError, ValueError: for anything else.
    """
    kind, name = target
    if kind != "op":
        return _FUNCTIONS[kind, name]
    namespace, packet, overload = name.split(".")
    if namespace not in private.TORCH_NAMESPACES:
        raise ValueError(f"{name} is no operator of torch's own")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, private.OpOverload) or private.argument_place(found, ("filename",)):
        raise ValueError(f"{name} is no operation on tensors")
    return found


def _name(text: str) -> str:
    """Return a text that becomes a name in code.

    Raises:
        ValueError: if it would become something else.
    """
    if not text.isidentifier() or iskeyword(text):
        raise ValueError(f"{text!r} is no name")
    return text


class Rebuilt:
    """Build a graph from what was kept, with fake tensors and symbols of a live trace.

    Args:
        kept: the graph. Whatever its readers raise, it is none.
        mode: in which fake tensors live; its environment knows the symbols.
    """

    def __init__(self, kept: KeptGraph, mode: Any) -> None:
        self._kept, self._mode, self._env = kept, mode, mode.shape_env
        self._expressions = expressions_of(kept.expressions)
        self._nodes: dict[str, fx.Node] = {}
        self._sizes: dict[Any, Any] = {}
        self._tensors: dict[Any, torch.Tensor] = {}

    def fields(self) -> dict[str, Any]:
        """Return the fields of the joint graph."""
        fields: dict[str, Any] = self._plain(self._kept.fields)
        return fields

    def module(self) -> fx.GraphModule:
        """Return the graph in a module without constants."""
        graph = fx.Graph()
        for op, name, target, args, kwargs, value, known in self._kept.nodes:
            function = _function(target) if op == "call_function" else _name(target)
            named = {_name(key): item for key, item in self._plain(kwargs).items()}
            node = graph.create_node(op, function, self._plain(args), named, name=_name(name))
            if node.name != name:
                raise ValueError(f"{name} has become {node.name}")
            node.meta = self._plain(known)
            for one in value:
                node.meta["val"] = self._value(one)
            self._nodes[name] = node
        return private.HeldGraphModule(nn.Module(), graph)

    def _plain(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        kind, content = value
        match kind:
            case "node":
                return self._nodes[content]
            case "tuple":
                return tuple(map(self._plain, content))
            case "list":
                return list(map(self._plain, content))
            case "dict":
                return {self._plain(key): self._plain(item) for key, item in content}
            case "slice":
                return slice(*map(self._plain, content))
            case "complex":
                return complex(*content)
            case "torch":
                return _NAMED[content]
            case "device":
                return torch.device(content)
            case "expression":
                return self._expressions[content]
        raise ValueError(f"{kind} is no kind of value")

    def _value(self, value: Any) -> Any:
        match value:
            case ["tuple", items]:
                return tuple(map(self._value, items))
            case ["list", items]:
                return list(map(self._value, items))
            case ["tensor", [shape, stride, dtype, device]]:
                return self._tensor(shape, stride, dtype, device)
            case ["int" | "float", _]:
                return self._size(value)
        return self._plain(value)

    def _tensor(self, shape: list[Any], stride: list[Any], dtype: str, device: str) -> torch.Tensor:
        """Return a fake tensor; those of one form are one, as nothing else is known of them."""
        form = repr((shape, stride, dtype, device))
        if form not in self._tensors:
            sizes = ([self._size(size) for size in one] for one in (shape, stride))
            with self._mode:
                self._tensors[form] = torch.empty_strided(*sizes, dtype=_NAMED[dtype], device=device)
        return self._tensors[form]

    def _size(self, size: Any) -> Any:
        if not isinstance(size, list):
            return size
        kind, (number, hint) = size
        if (kind, number, hint) not in self._sizes:
            make = self._env.create_symintnode if kind == "int" else self._env.create_symfloatnode
            self._sizes[kind, number, hint] = make(self._expressions[number], hint=hint)
        return self._sizes[kind, number, hint]
