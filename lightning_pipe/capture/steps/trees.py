"""What a step returns or logs as a tree: dicts, lists, tuples, named tuples, sizes and dataclasses are its branches."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any

import torch

from lightning_pipe.capture.steps.record import STAND_INS


class _UnknownSize(tuple[Any, ...]):
    """A `torch.Size` with stand-ins for numbers."""


def branches(value: Any) -> dict[Any, Any] | None:
    """Return what is in a value by key, name or index; None for a leaf."""
    if isinstance(value, STAND_INS):
        return None
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return None


def rebuilt(value: Any, items: Mapping[Any, Any]) -> Any:
    """Return something like a value with other branches, by the keys of `branches`."""
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, items)
    if isinstance(value, Mapping):
        return dict(items) if isinstance(value, MappingProxyType) else type(value)(dict(items))  # type: ignore[call-arg]
    if isinstance(value, (list, tuple)):
        return _sequence(value, [items[i] for i in range(len(value))])
    other = copy(value)
    for name, item in items.items():
        object.__setattr__(other, name, item)  # it may be frozen
    return other


def mapped(value: Any, kinds: type | tuple[type, ...], function: Callable[[Any], Any]) -> Any:
    """Return a tree with what a function makes of the leaves of some kinds."""
    if isinstance(value, kinds):
        return function(value)
    inside = branches(value)
    if not inside:
        return value
    return rebuilt(value, {key: mapped(item, kinds, function) for key, item in inside.items()})


def leaves_mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tree with what a function makes of its leaves."""
    inside = branches(value)
    if inside is None:
        return function(value)
    return rebuilt(value, {key: leaves_mapped(item, function) for key, item in inside.items()})


def found_in(value: Any, kinds: type | tuple[type, ...]) -> Iterator[Any]:
    """Yield the leaves of some kinds, in the order of `mapped`."""
    if isinstance(value, kinds):
        yield value
        return
    for item in (branches(value) or {}).values():
        yield from found_in(item, kinds)


def can_be_told(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return whether other ranks can be told a tree, whose leaves of some kinds travel in another way."""
    try:
        pickle.dumps(mapped(value, kinds, lambda _: None))
    except Exception:  # whatever an object raises that cannot be pickled
        return False
    return True


def _sequence(value: Sequence[Any], items: list[Any]) -> Any:
    if hasattr(value, "_fields"):
        return type(value)(*items)
    if isinstance(value, (torch.Size, _UnknownSize)):
        return torch.Size(items) if all(isinstance(item, int) for item in items) else _UnknownSize(items)
    return type(value)(items)  # type: ignore[call-arg]
