"""Let a module be built without its values: `with building():` around the user's constructor.

Inside, tensors that are made on the host (or on the meta device) have no values and say that they are on the host; a
tape remembers what is done with them. At the end

    parameters             have no values yet (`pending`)
    all other tensors      (buffers, tables in lists and closures) are made, on every rank, wherever they are kept
    what shares memory     with one of those is made too

Other devices, and tensors that were there before, are as ever.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pipe.capture.torch_private import swap_contents, without_modes, without_overrides
from lightning_pipe.strategy.parameters.pending import PendingRecording, suspend
from lightning_pipe.strategy.start.tape import Tape

_FLAGS = {"device": torch.device("cpu"), "is_meta": False, "is_cpu": True}
_OF_VALUES = frozenset({"numpy", "tolist", "__array__", "__reduce_ex__", "__dlpack__"})


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Build modules inside whose parameters have no values yet."""
    tape = Tape()
    with _Pretending(tape), PendingRecording(tape):
        yield
    _settle(tape)


class _Pretending(TorchFunctionMode):
    """Let tensors that are not made yet be on the host, and be read by Python."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a function of torch."""
        kwargs, name, first = kwargs or {}, getattr(func, "__name__", ""), args[0] if args else None
        if not isinstance(first, torch.Tensor) or not self._tape.holds(first):
            return func(*args, **kwargs)
        if name == "__get__" and (flag := getattr(func.__self__, "__name__", "")) in _FLAGS:
            return _FLAGS[flag]
        if name == "data_ptr":  # asked to find out which tensors are one
            return 1 + self._tape.storage(first) * 2**44 + first.storage_offset() * first.itemsize
        if name not in _OF_VALUES:
            return func(*args, **kwargs)
        value = self._tape.value(first)
        with without_modes():
            found = func(value, *args[1:], **kwargs)
        if name in ("numpy", "__array__"):
            found.flags.writeable = False  # it is a copy
        return found


def _settle(tape: Tape) -> None:
    """Make what is no parameter, and leave parameters without values."""
    with without_overrides():
        alive = [thing for thing in gc.get_objects() if torch.Tensor in type(thing).__mro__ and tape.holds(thing)]
        at_once = {tape.storage(one) for one in alive if not isinstance(one, nn.Parameter)}
        now = [one for one in alive if tape.storage(one) in at_once]
        later = [one for one in alive if tape.storage(one) not in at_once]
        for one, value in zip(now, tape.values(now), strict=True):
            _become(one, value)
        for parameter in later:
            suspend(parameter, tape)


def _become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    with torch.no_grad():
        other = value.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    swap_contents(tensor, other)
