"""Graphs kept on disk: what tracing a step has given, for a later process that sees the same step (`kept_traces`).

One file holds one graph, in plain Python values. Its operations are those of torch by name; expressions over symbolic
sizes are sympy's. Nothing else is read from a file, so that one can hold no code. Graphs with constants, or anything
that has no name, are not kept. A file that cannot be read is traced again; of many the ones that are used least give
way. Files are replaced as a whole.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import operator
import os
import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn

from lightning_pipe.capture import torch_private as private

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 30  # of all graphs of a folder: some hundreds of large models
_open = io.open  # while a step is traced, `open` refuses what the step does not read itself
_ADDED = "Gradient addition"  # torch's own mark on additions of gradients, in a stack trace
_SIMPLE = (bool, int, float, complex, str, type(None))
_MODULES: Mapping[str, Any] = {"_operator": operator, "math": math, "torch": torch}
_NAMED_KINDS = (torch.dtype, torch.layout, torch.memory_format)
_NAMED: Mapping[str, Any] = {str(value): value for value in vars(torch).values() if isinstance(value, _NAMED_KINDS)}


class NotKept(Exception):
    """A graph has something that cannot be kept; the text says what."""


@dataclass(frozen=True)
class KeptGraph:
    """A traced graph without its module, as `JointGraph` has it; `record`, guards and calls belong to a process.

    Attributes:
        nodes: one row per node.
        fields: of `JointGraph`, by name.
        fingerprint: of the graph.
    """

    nodes: list[tuple[Any, ...]]
    fields: Mapping[str, Any]
    fingerprint: str


def store(folder: Path, key: str, kept: KeptGraph) -> None:
    """Keep a graph; a folder that cannot be written is said once and stops nothing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                pickle.dump((kept.nodes, dict(kept.fields), kept.fingerprint), file, protocol=5)
            os.replace(name, folder / f"{key}.graph")
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _drop_oldest(folder)
    except OSError as error:
        log.warning("A captured graph cannot be kept in %s (%s); the next start captures it again.", folder, error)


def load(folder: Path, key: str) -> KeptGraph | None:
    """Return a kept graph; None where there is none, or one that cannot be read."""
    path = folder / f"{key}.graph"
    try:
        with _open(path, "rb") as file:
            kept = KeptGraph(*_Reader(file).load())
        os.utime(path)
    except FileNotFoundError:
        return None
    except Exception as error:
        log.warning("The captured graph in %s cannot be read (%r); it is captured again.", path, error)
        return None
    return kept


def forget(folder: Path, key: str) -> None:
    """Remove a kept graph."""
    with contextlib.suppress(OSError):
        (folder / f"{key}.graph").unlink()


def _drop_oldest(folder: Path) -> None:
    """Remove the graphs that were not used for longest, where all of them take too many bytes."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                if entry.name.endswith(".graph"):
                    found.append((entry.stat(), entry.path))
    taken = sum(stat.st_size for stat, _ in found)
    for stat, path in sorted(found, key=lambda one: one[0].st_mtime):
        if taken <= _MOST_BYTES:
            return
        Path(path).unlink(missing_ok=True)
        taken -= stat.st_size


class _Reader(pickle.Unpickler):
    """Read plain values and expressions of sympy, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of expressions.

        Raises:
            pickle.UnpicklingError: for anything else.
        """
        if module.partition(".")[0] == "sympy" or module == "torch.utils._sympy.functions":
            found = super().find_class(module, name)
            if isinstance(found, type) and issubclass(found, sympy.Basic):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is no expression")


def rows_of(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return the nodes of a graph as plain values.

    Raises:
        NotKept: if one has something that has no name.
    """
    return [_row(node) for node in graph.nodes]


def _row(node: fx.Node) -> tuple[Any, ...]:
    if node.op not in ("placeholder", "call_function", "output"):
        raise NotKept(f"{node.name} is a constant")
    target = _target(node.target) if node.op == "call_function" else str(node.target)
    known: dict[str, Any] = {key: node.meta[key] for key in ("custom", "seq_nr", "partitioner_tag") if key in node.meta}
    if _ADDED in (node.meta.get("stack_trace") or ""):
        known["stack_trace"] = _ADDED
    value = (_value(node.meta["val"]),) if "val" in node.meta else ()
    return (node.op, node.name, target, _written(node.args), _written(node.kwargs), value, known)


def _target(target: Any) -> tuple[str, str]:
    if isinstance(target, private.OpOverload):
        return ("op", str(target))
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if module in _MODULES and getattr(_MODULES[module], name, None) is target:
        return (module, name)
    raise NotKept(f"{target} has no name")


def _function(target: tuple[str, str]) -> Any:
    kind, name = target
    if kind != "op":
        return getattr(_MODULES[kind], name)
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload)


def _written(value: Any) -> Any:
    """Return an argument as plain values."""
    if isinstance(value, fx.Node):
        return ("node", value.name)
    if isinstance(value, tuple):
        return ("tuple", [_written(item) for item in value])
    if isinstance(value, list):
        return ("list", [_written(item) for item in value])
    if isinstance(value, dict):
        return ("dict", {key: _written(item) for key, item in value.items()})
    if isinstance(value, slice):
        return ("slice", [_written(item) for item in (value.start, value.stop, value.step)])
    if isinstance(value, _NAMED_KINDS):
        return ("torch", str(value))
    if isinstance(value, torch.device):
        return ("device", str(value))
    if type(value) in _SIMPLE:
        return value
    raise NotKept(f"an argument is a {type(value).__name__}")


def _value(value: Any) -> Any:
    """Return what is known of the value of a node as plain values."""
    if type(value) in _SIMPLE:
        return value
    if isinstance(value, (tuple, list)):
        return ("tuple" if isinstance(value, tuple) else "list", [_value(item) for item in value])
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return _size(value)
    if not isinstance(value, private.FakeTensor) or value.layout is not torch.strided:
        raise NotKept(f"a value is a {type(value).__name__}")
    shape, stride = (tuple(_size(size) for size in sizes) for sizes in (value.shape, value.stride()))
    return ("tensor", shape, stride, str(value.dtype), str(value.device))


def _size(size: Any) -> Any:
    if isinstance(size, int):
        return size
    kind = "int" if isinstance(size, torch.SymInt) else "float"
    return (kind, size.node.expr, size.node.hint)


class Rebuilt:
    """Build a graph of rows, with fake tensors and symbols of a live trace.

    Args:
        mode: in which fake tensors live; its environment knows the symbols.
    """

    def __init__(self, mode: Any) -> None:
        self._mode, self._env = mode, mode.shape_env
        self._nodes: dict[str, fx.Node] = {}
        self._sizes: dict[Any, Any] = {}
        self._tensors: dict[Any, torch.Tensor] = {}

    def module(self, rows: list[tuple[Any, ...]]) -> fx.GraphModule:
        """Return the graph in a module without constants."""
        graph = fx.Graph()
        for op, name, target, args, kwargs, value, known in rows:
            function = _function(target) if op == "call_function" else target
            node = graph.create_node(op, function, self._read(args), self._read(kwargs), name=name)
            if node.name != name:
                raise ValueError(f"{name} has become {node.name}")
            node.meta = dict(known)
            for one in value:
                node.meta["val"] = self._value(one)
            self._nodes[name] = node
        return fx.GraphModule(nn.Module(), graph)

    def _read(self, value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        kind, content = value
        match kind:
            case "node":
                return self._nodes[content]
            case "tuple":
                return tuple(map(self._read, content))
            case "list":
                return list(map(self._read, content))
            case "dict":
                return {key: self._read(item) for key, item in content.items()}
            case "slice":
                return slice(*map(self._read, content))
            case "torch":
                return _NAMED[content]
            case _:
                return torch.device(content)

    def _value(self, value: Any) -> Any:
        match value:
            case ("tuple", list(items)):
                return tuple(map(self._value, items))
            case ("list", list(items)):
                return list(map(self._value, items))
            case ("tensor", shape, stride, dtype, device):
                return self._tensor(shape, stride, dtype, device)
            case _:
                return self._size(value)

    def _tensor(self, shape: tuple[Any, ...], stride: tuple[Any, ...], dtype: str, device: str) -> torch.Tensor:
        """Return a fake tensor; those of one form are one, as nothing else is known of them."""
        form = (shape, stride, dtype, device)
        if form not in self._tensors:
            sizes = ([self._size(size) for size in one] for one in (shape, stride))
            with self._mode:
                self._tensors[form] = torch.empty_strided(*sizes, dtype=_NAMED[dtype], device=device)
        return self._tensors[form]

    def _size(self, size: Any) -> Any:
        if not isinstance(size, tuple):
            return size
        if size not in self._sizes:
            kind, expression, hint = size
            make = self._env.create_symintnode if kind == "int" else self._env.create_symfloatnode
            self._sizes[size] = make(expression, hint=hint)
        return self._sizes[size]
