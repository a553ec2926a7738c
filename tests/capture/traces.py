"""Look for tensors of a trace that somebody still holds."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch

from lightning_pipe.capture.torch_private import is_traced


def traced_inside(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[str]:
    """Yield the paths of all tensors of a trace that can be reached from a value."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, (str, bytes, int, float, type, types.ModuleType, types.FunctionType)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if is_traced(value):
            yield path
        return
    items: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, (list, tuple, set, frozenset)):
        items = list(enumerate(value))
    items += list(getattr(value, "__dict__", {}).items())
    for key, item in items:
        yield from traced_inside(item, f"{path}.{key}", seen)
