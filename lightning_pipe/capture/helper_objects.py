"""Objects of the user's that hang in a module and are no modules: what a step puts into them while it is traced.

A helper that collects predictions would keep tensors without data, and fail when it is asked for its result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pipe.capture.hazards import attributes_of, refill
from lightning_pipe.capture.torch_private import is_traced

_COLLECTIONS = (list, dict, set, deque)
_CLOSED = (str, bytes, int, float, complex, torch.Tensor, nn.Module, np.ndarray, np.generic, type, ModuleType)
_DEEPEST, _LONGEST = 4, 1000  # levels, and entries of a collection, that are looked through


@dataclass(frozen=True)
class _Content:
    """Attributes of an object, or a collection, and what it held."""

    path: str
    now: Any
    before: Any


class HelperObjects:
    """What the helpers of a module hold at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._seen: set[int] = set()
        self._contents = [
            content
            for prefix, owner in module.named_modules()
            for name, value in attributes_of(owner).items()
            for content in self._inside(value, f"{prefix}.{name}" if prefix else name, _DEEPEST)
        ]

    def restore(self) -> None:
        """Put everything back."""
        for content in self._contents:
            refill(content.now, content.before)

    def restore_traced(self) -> str:
        """Put back what traced tensors were put into; return the path of the innermost of it, "" if there is none."""
        changed = [content for content in self._contents if _holds_traced(content.now)]
        for content in changed:
            refill(content.now, content.before)
        return changed[-1].path if changed else ""

    def _inside(self, value: Any, path: str, levels: int) -> Iterator[_Content]:
        if value is None or isinstance(value, _CLOSED) or id(value) in self._seen or not levels:
            return
        self._seen.add(id(value))
        if isinstance(value, tuple):
            items = list(enumerate(value))
        elif isinstance(value, _COLLECTIONS):
            yield _Content(path, value, value.copy())
            items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
        elif isinstance(own := getattr(value, "__dict__", None), dict):
            yield _Content(path, own, own.copy())
            items = [(f".{name}", item) for name, item in own.items()]
        else:
            return
        if len(items) <= _LONGEST:
            for key, item in items:
                yield from self._inside(
                    item, path + key if str(key).startswith(".") else f"{path}[{key!r}]", levels - 1
                )


def is_helper(value: Any) -> bool:
    """Return whether a value is an object of the user's that can hold others, and no collection."""
    closed = (*_CLOSED, tuple, *_COLLECTIONS)
    return value is not None and not isinstance(value, closed) and isinstance(getattr(value, "__dict__", None), dict)


def content_of(value: Any, levels: int = _DEEPEST) -> Iterator[Any]:
    """Yield what a helper holds, in its attributes and the collections and helpers among them."""
    if not levels:
        return
    if is_helper(value):
        items = list(vars(value).values())
    elif isinstance(value, (tuple, *_COLLECTIONS)) and len(value) <= _LONGEST:
        items = [*value, *value.values()] if isinstance(value, dict) else list(value)
    else:
        return
    for item in items:
        yield item
        yield from content_of(item, levels - 1)


def _holds_traced(value: Any, levels: int = 2) -> bool:
    if isinstance(value, torch.Tensor):
        return is_traced(value)
    if not levels or not isinstance(value, (tuple, *_COLLECTIONS)):
        return False
    items = value.values() if isinstance(value, dict) else value
    return any(_holds_traced(item, levels - 1) for item in items)
