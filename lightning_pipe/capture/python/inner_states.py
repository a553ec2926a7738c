"""Things whose state is asked for and set by functions: generators of random numbers, arrays, buffers, iterators."""

from __future__ import annotations

import array
import ctypes
import random
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch

from lightning_pipe.capture.python.places import SCALARS
from lightning_pipe.capture.torch_private import outside_of_modes

COPIED_BYTES = 2**20  # of an array whose content can be put back; of a larger one, a checksum is compared

State: TypeAlias = tuple[Callable[[], Any], Callable[[Any], Any] | None]
_NUMBERS_OF_C: tuple[Any, ...] = (ctypes.Array, ctypes.Structure, ctypes.c_double.__base__)


def inner_state(value: Any) -> State | None:
    """Return how the state of an object is read, and how it is set (None: it cannot be).

    None for an object that has none of its own, or that lets nobody look into it.
    """
    if isinstance(value, np.ndarray):
        return _array_state(value)
    if isinstance(value, Iterator):
        return _iterator_state(value)
    return generator_state(value) or _buffer_state(value)


def state_of(value: Any) -> Any:
    """Return the state of a generator of random numbers, or the content of an array or tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    functions = generator_state(value)
    return None if functions is None else functions[0]()


def set_state(value: Any, state: Any) -> None:
    """Give a generator its state back, or an array or tensor its content."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(state)
    elif isinstance(value, np.ndarray):
        value[...] = state
    elif (functions := generator_state(value)) is not None:
        functions[1](state.cpu() if isinstance(state, torch.Tensor) else state)


def generator_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """Return how the state of a generator of random numbers is read and set, None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        bits = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(value, torch.Generator):
        return outside_of_modes(value.get_state), outside_of_modes(value.set_state)
    return None


def _buffer_state(value: Any) -> State | None:
    if isinstance(value, bytearray):
        return lambda: bytes(value), lambda state: value.__setitem__(slice(None), state)
    if isinstance(value, array.array):
        return value.tobytes, lambda state: value.__setitem__(slice(None), array.array(value.typecode, state))
    if isinstance(value, _NUMBERS_OF_C):
        return lambda: bytes(value), lambda state: ctypes.memmove(ctypes.addressof(value), state, len(state))
    return None


def _array_state(values: np.ndarray[Any, Any]) -> State:
    if values.dtype.hasobject:
        return values.tolist, None

    def write(content: bytes) -> None:
        values[...] = np.frombuffer(content, dtype=values.dtype).reshape(values.shape)

    if values.nbytes <= COPIED_BYTES:
        return values.tobytes, write if values.flags.writeable else None
    return lambda: zlib.crc32(np.ascontiguousarray(values).view(np.uint8).data), None


def _iterator_state(value: Any) -> State | None:
    """Return how an iterator would be pickled."""
    try:
        value.__reduce__()
    except Exception:  # no way to look into it: it counts by identity
        return None
    return lambda: _reduced(value), None


def _reduced(value: Any) -> Any:
    """Return how an iterator would be pickled, and the iterators that it reads from; other objects by identity."""
    if isinstance(value, Iterator):
        return [_reduced(part) for part in value.__reduce__()[1:]]
    if isinstance(value, (tuple, list)):
        return [_reduced(part) for part in value]
    return value if isinstance(value, SCALARS) else id(value)


def equal_states(one: Any, two: Any) -> bool:
    """Return whether two states are equal."""
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal_states(one[key], two[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(two) and all(map(equal_states, one, two))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, two))
    if isinstance(one, torch.Tensor):
        return bool(outside_of_modes(torch.equal)(one, two))
    return bool(one == two)
