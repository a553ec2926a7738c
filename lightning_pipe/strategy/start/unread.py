"""A tensor whose values are in a file: whoever uses it reads them; a parameter without values reads them later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipe.capture.torch_private import unguarded

_OF_FORM = frozenset(
    "shape ndim nbytes itemsize dtype layout requires_grad is_sparse size dim numel element_size is_floating_point "
    "is_complex stride __len__".split()
)
_ON_HOST = {"device": torch.device("cpu"), "is_meta": False, "is_cpu": True, "is_cuda": False}


class Unread(torch.Tensor):
    """A tensor on the meta device that answers like one on the host; its values are read when they are asked for.

    Attributes:
        read: reads them.
    """

    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, size: Any, dtype: torch.dtype, read: Callable[[], torch.Tensor]) -> Unread:
        """Return a tensor that `read` reads."""
        tensor = torch.empty(size, dtype=dtype, device="meta").as_subclass(cls)
        tensor.read = read
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer what does not depend on values, and read them for the rest."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if attribute in _ON_HOST:
            return _ON_HOST[attribute]
        with unguarded():
            if attribute in _OF_FORM:
                return func(*args, **kwargs)
            real = apply_to_collection((args, kwargs), Unread, lambda tensor: tensor.read())
            return func(*real[0], **real[1])
