"""`type(x)` of what stands for a value while a step is traced: the class that the value has on one device.

A stand-in can claim another `__class__`, but no object can answer `type(x)`. So the user's files find another `type`
among their globals while the step runs. It stands for the built-in class in calls, in `isinstance` and as a base.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture.torch_private import FakeTensor, FunctionalTensor

_STAND_INS = "lightning_pipe.capture."
_TENSORS = (FakeTensor, FunctionalTensor)
_SIZES: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


def type_on_one_device(value: Any) -> type:
    """Return the class of a value; of what stands for one, the class of that."""
    kind = type(value)
    if kind.__module__.startswith(_STAND_INS):
        claimed: type = value.__class__
        return str if claimed is kind and issubclass(kind, str) else claimed
    if issubclass(kind, _TENSORS):
        return nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor
    return _SIZES.get(kind, kind)


class _AnsweredType:
    """Stand for the class `type`."""

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if len(arguments) != 1 or keywords:
            return type(*arguments, **keywords)
        kind = type_on_one_device(arguments[0])
        return self if kind is type else kind

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(self, cls: Any) -> bool:
        return cls is self or issubclass(cls, type)

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (type,)

    def __eq__(self, other: object) -> bool:
        return other is type or other is self

    def __hash__(self) -> int:
        return hash(type)

    def __repr__(self) -> str:
        return repr(type)

    def __getitem__(self, item: Any) -> Any:
        return types.GenericAlias(type, item)

    def __or__(self, other: Any) -> Any:
        return type | other

    def __ror__(self, other: Any) -> Any:
        return other | type

    def __getattr__(self, name: str) -> Any:
        return getattr(type, name)


ANSWERED_TYPE = _AnsweredType()


class AnsweredTypes:
    """Files of the user whose code finds another `type` until the end of `answering`."""

    def __init__(self) -> None:
        self._files: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Take it away from all files in the end."""
        try:
            yield
        finally:
            for namespace in self._files:
                if namespace.get("type") is ANSWERED_TYPE:
                    del namespace["type"]
            self._files.clear()

    def note(self, namespace: dict[str, Any]) -> None:
        """Give it to the file of code that is about to run, by the globals of the file."""
        if "type" not in namespace:
            namespace["type"] = ANSWERED_TYPE
            self._files.append(namespace)
