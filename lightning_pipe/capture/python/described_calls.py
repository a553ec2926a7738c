"""Descriptions of torch calls that can be compared: what a call was made with, as plain values."""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_pipe.capture.torch_private import has_no_data, has_storage, without_modes
from lightning_pipe.capture.tracked.tracked_number import is_tracked


@dataclass(frozen=True, eq=False)
class SymbolicNumber:
    """A size that is a symbol, or what a step makes of one; equal to another one, and to the number that it stands for.

    Attributes:
        kind: "SymInt", "SymFloat" or "SymBool".
        hint: what it is for the samples that are traced with.
    """

    kind: str
    hint: float | bool | None = field(compare=False)  # the identity of a step does not depend on it

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SymbolicNumber):
            return self.kind == other.kind
        return type(other) is type(self.hint) and other == self.hint

    def __repr__(self) -> str:
        return self.kind

    __hash__ = None  # type: ignore[assignment]


_CONVERSIONS = {"double": "float64", "float": "float32", "half": "float16", "long": "int64", "int": "int32"} | {
    name: name for name in ("bool", "bfloat16")
}


def described(name: str, args: Any, kwargs: Any) -> Any:
    """Describe a call; `x.double()` as `x.to(dtype=...)`, which it is for the tensors of one of both traces."""
    if name in _CONVERSIONS:
        return ("to", _describe(args), (("dtype", f"torch.{_CONVERSIONS[name]}"),))
    return (name, _describe(args), _describe(kwargs))


def _checksum(tensor: torch.Tensor) -> int:
    """Return a number that changes with the content of a tensor, wherever it is."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        with without_modes():
            tensor = tensor.detach().cpu().contiguous()
    return zlib.crc32(ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()))


def _describe(value: Any) -> Any:
    """Return something comparable that changes when a number, or a constant tensor's content, changes."""
    if isinstance(value, torch.Tensor):
        if has_no_data(value) or value.is_meta or not has_storage(value):
            return ("tensor", str(value.dtype), value.ndim)
        return ("constant", str(value.dtype), tuple(value.shape), _checksum(value))
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, zlib.crc32(value.tobytes()))
    if isinstance(value, (tuple, list)):
        return tuple(_describe(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _describe(item)) for key, item in value.items())
    if is_tracked(value):
        return ("tracked", value.expression)
    if isinstance(value, np.number | np.bool_):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value if value == value else repr(value)  # not-a-number equals itself here
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return SymbolicNumber(type(value).__name__, value.node.hint)
    return type(value).__name__
