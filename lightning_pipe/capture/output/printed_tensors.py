"""Tensors as a step prints them: their content at that time, and what their texts say of autograd."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from lightning_pipe.capture.torch_private import with_node, without_overrides

MOST_PRINTED = 1 << 16  # numbers of a tensor that are fetched to be printed; a text shows a thousand


class GradientKind(str):
    """What the text of a tensor says of autograd: its node, "parameter", "leaf", or "" for nothing."""

    __slots__ = ()


def kind_of(tensor: torch.Tensor) -> GradientKind:
    """Return what the text of a tensor says of autograd."""
    with without_overrides():
        node = tensor.grad_fn
        is_leaf = tensor.requires_grad
    if node is not None:
        return GradientKind(type(node).__name__)
    return GradientKind("parameter" if isinstance(tensor, nn.Parameter) else "leaf" if is_leaf else "")


def as_printed(tensor: torch.Tensor, kind: GradientKind) -> torch.Tensor:
    """Return a tensor whose text says this of autograd."""
    if kind == "parameter":
        return nn.Parameter(tensor)
    if kind == "leaf":
        return tensor.detach().requires_grad_()
    return with_node(tensor, kind)


@dataclass(frozen=True)
class TooLarge:
    """Stand for a tensor that is not fetched from its stage to be printed: its text says its shape."""

    shape: tuple[int, ...]
    dtype: str

    def __repr__(self) -> str:
        return f"tensor(<too large to be fetched for its text>, shape={self.shape}, dtype={self.dtype})"


class Elsewhere:
    """Stand for a value that another stage has, in output that was not there when the step was traced."""

    def __repr__(self) -> str:
        return "<a value of another stage>"

    def _unknown(self, *_: object) -> Elsewhere:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _unknown
    __round__ = __getitem__ = _unknown

    def __format__(self, form: str) -> str:
        return repr(self)


def is_too_large(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is not fetched to be printed."""
    return int(math.prod(tensor.shape)) > MOST_PRINTED
