"""Tensor operations that read tracked numbers as inputs of the graph, instead of as constants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_pipe.capture.tracked.number_expressions import MOST_INPUTS, Number
from lightning_pipe.capture.tracked.tracked_number import TrackedNumber

_ARITHMETIC = frozenset(
    "mul __mul__ __rmul__ multiply add __add__ __radd__ sub __sub__ __rsub__ rsub subtract div __div__ __rdiv__ "
    "__truediv__ __rtruediv__ true_divide divide gt __gt__ lt __lt__ ge __ge__ le __le__ lerp".split()
)
_IN_PLACE = frozenset("mul_ __imul__ add_ __iadd__ sub_ __isub__ div_ __itruediv__ lerp_".split())
_FACTORIES = frozenset({"tensor", "as_tensor", "scalar_tensor", "full"})
_COARSE = (torch.float16, torch.bfloat16)


def with_inputs(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], vector: torch.Tensor) -> Any:
    """Run a call of torch that has tracked numbers among its arguments.

    A number that the call only scales, adds, compares or makes a tensor of is read from the graph's vector of numbers;
    any other is pinned.

    Args:
        func: what is called.
        args, kwargs: its arguments.
        vector: the graph's numbers, double precision.
    """
    name = getattr(func, "__name__", "")
    places = [i for i, argument in enumerate(args) if isinstance(argument, TrackedNumber)]
    if len(places) == 1 and not any(map(_holds_tracked, (*args[: places[0]], *args[places[0] + 1 :], kwargs))):
        number = args[places[0]]
        slot = _input_slot(number)
        if slot is not None and name in _ARITHMETIC | _IN_PLACE and not kwargs:
            result = _arithmetic(func, args, places[0], vector[slot], in_place=name in _IN_PLACE)
            if result is not NotImplemented:
                return result
        if slot is not None and name in _FACTORIES and not kwargs.get("requires_grad"):
            return _made(args, kwargs, places[0], number.value, vector[slot])
    return func(*_pinned(args), **_pinned(dict(kwargs)))


def _input_slot(number: TrackedNumber) -> int | None:
    inputs = number.guards.inputs
    if number.expression not in inputs and len(inputs) == MOST_INPUTS:
        return None
    return inputs.setdefault(number.expression, len(inputs))


def _arithmetic(func: Any, args: tuple[Any, ...], place: int, entry: torch.Tensor, *, in_place: bool) -> Any:
    """Compute with a tensor in the place of a number, rounded as torch rounds numbers."""
    tensors = [argument for argument in args if isinstance(argument, torch.Tensor)]
    if not tensors or len(tensors) != len(args) - 1:
        return NotImplemented
    first = tensors[0]
    dtype = torch.result_type(first, args[place].value)
    if in_place and first.dtype != dtype:
        return NotImplemented
    if dtype in _COARSE:  # torch computes with the number in single precision
        if in_place:
            return NotImplemented
        wide = [a.to(torch.float32) if isinstance(a, torch.Tensor) else entry.to(torch.float32) for a in args]
        result = func(*wide)
        return result if result.dtype == torch.bool else result.to(dtype)
    return func(*args[:place], entry.to(dtype), *args[place + 1 :])


def _made(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, value: Number, entry: torch.Tensor) -> Any:
    default = torch.get_default_dtype() if isinstance(value, float) else torch.int64
    dtype, device = kwargs.get("dtype") or default, kwargs.get("device")
    made = entry.to(dtype=dtype, device=device if device is not None else torch.get_default_device())
    return made.clone() if place == 0 else made.expand(args[0]).clone()


def _holds_tracked(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tracked, value))
    if isinstance(value, dict):
        return any(map(_holds_tracked, value.values()))
    if isinstance(value, slice):
        return any(map(_holds_tracked, (value.start, value.stop, value.step)))
    return isinstance(value, TrackedNumber)


def has_tracked(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether there are tracked numbers among the arguments of a call."""
    return any(map(_holds_tracked, args)) or any(map(_holds_tracked, kwargs.values()))


def _pinned(value: Any) -> Any:
    if isinstance(value, TrackedNumber):
        return value.pinned()
    if type(value) in (list, tuple):
        return type(value)(map(_pinned, value))
    if type(value) is dict:
        return {key: _pinned(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_pinned(value.start), _pinned(value.stop), _pinned(value.step))
    return value
