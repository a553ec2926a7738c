"""Fingerprint of a joint graph: equal in every process that has captured the same step.

Operators, arguments and shapes are spelled out; nothing of it may depend on where an object lies in memory.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.torch_private import OpOverload

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+\b")
_PLAIN = (OpOverload, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.SymInt, torch.SymFloat)


def fingerprint(joint: JointGraph) -> str:
    """Return a hash of the graph that is equal in every process."""
    digest = hashlib.sha256()
    for node in joint.module.graph.nodes:
        text = _line(node)
        digest.update((text if joint.symbol is None else text.replace(joint.symbol.name, "samples")).encode())
    return digest.hexdigest()[:16]


def _line(node: fx.Node) -> str:
    args, kwargs = spelled(node.args), spelled(node.kwargs)
    return f"{node.op} {node.name} {spelled(node.target)} {args} {kwargs} {_form(node)}\n"


def spelled(value: Any) -> str:
    """Return a text of an operator or argument that is the same in every process."""
    match value:
        case tuple() | list():
            return f"({', '.join(map(spelled, value))})"
        case Mapping():
            return f"{{{', '.join(f'{key}: {spelled(item)}' for key, item in value.items())}}}"
        case slice():
            return f"slice{spelled((value.start, value.stop, value.step))}"
        case functools.partial():
            return f"partial({spelled(value.func)}, {spelled(value.args)}, {spelled(value.keywords)})"
        case str() | None | bool() | int() | float() | complex():
            return str(value)
        case fx.Node():
            return value.name
    if isinstance(value, _PLAIN):
        return str(value)
    if hasattr(value, "__qualname__"):  # a Python function or class
        return f"{value.__module__}.{value.__qualname__}"
    return _ADDRESS.sub("", str(value))


def _form(node: fx.Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return " ".join(f"{v.dtype}{tuple(v.shape)}" if isinstance(v, torch.Tensor) else spelled(v) for v in values)
