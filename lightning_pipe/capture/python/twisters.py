"""States of the global generators of Python and NumPy, read from their memory.

`random.getstate()` makes 625 integers (10 us), and `numpy.random.get_state()` copies 624 one by one (40 us). Both
generators are Mersenne twisters (Matsumoto and Nishimura 1998), whose 624 words and position lie in one piece of
memory, which is copied in a microsecond. Besides, each keeps a normal number that it has drawn ahead.

Whether memory says what the generators say is tried once. Where it does not, and where somebody has given NumPy a
generator of another kind, they are asked.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
import random
import struct
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

_WORDS = 624
_PYTHON = struct.Struct(f"=i{_WORDS}I")  # position, words
_NUMPY = struct.Struct(f"={_WORDS}Ii")  # words, position
_HEADER = object.__basicsize__  # of every object; counts references


@dataclass(frozen=True)
class TwisterState:
    """State of one generator: equal ones are equal.

    Attributes:
        memory: its words and its position, as it keeps them; empty where it was asked.
        rest: what it keeps besides; where it was asked, all that it said.
    """

    memory: bytes
    rest: Any


def python_state() -> TwisterState:
    """Return the state of Python's generator."""
    generator: Any = _owner(random.getstate)
    if type(generator) is not random.Random or not _can_read():
        return TwisterState(b"", random.getstate())
    return TwisterState(_python_memory(generator), vars(generator)["gauss_next"])


def set_python_state(state: TwisterState) -> None:
    """Set the state of Python's generator."""
    random.setstate(_python_words(state) if state.memory else state.rest)


def numpy_state() -> TwisterState:
    """Return the state of NumPy's generator."""
    generator = _owner(np.random.get_state)
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # left out of NumPy's types
    if type(generator) is not np.random.RandomState or type(bits) is not np.random.MT19937 or not _can_read():
        return TwisterState(b"", pickle.dumps(np.random.get_state(legacy=False)))
    return TwisterState(_numpy_memory(bits), _drawn_ahead(_object_memory(generator)))


def set_numpy_state(state: TwisterState) -> None:
    """Set the state of NumPy's generator."""
    np.random.set_state(_numpy_words(state) if state.memory else pickle.loads(state.rest))


def _owner(function: Any) -> Any:
    """Return the generator whose method is a function of a module; None for a function of somebody else."""
    return getattr(function, "__self__", None)


def _python_memory(generator: random.Random) -> bytes:
    return ctypes.string_at(id(generator) + _HEADER, _PYTHON.size)


def _python_words(state: TwisterState) -> tuple[int, tuple[int, ...], float | None]:
    """Return a state as `random.getstate` does."""
    position, *words = _PYTHON.unpack(state.memory)
    return random.Random.VERSION, (*words, position), state.rest


def _numpy_memory(bits: np.random.BitGenerator) -> bytes:
    return ctypes.string_at(bits.ctypes.state_address, _NUMPY.size)


def _numpy_words(state: TwisterState) -> dict[str, Any]:
    """Return a state as `numpy.random.get_state` does."""
    *words, position = _NUMPY.unpack(state.memory)
    has_gauss, gauss = state.rest
    twister = {"key": np.array(words, dtype=np.uint32), "pos": position}
    return {"bit_generator": "MT19937", "state": twister, "has_gauss": has_gauss, "gauss": gauss}


def _object_memory(generator: np.random.RandomState) -> bytes:
    return ctypes.string_at(id(generator) + _HEADER, type(generator).__basicsize__ - _HEADER)


@functools.lru_cache(maxsize=1)
def _drawn_ahead(memory: bytes) -> tuple[int, float]:
    """Return what NumPy's generator has drawn ahead: a part of this memory of it, so the same until that changes."""
    state: Any = np.random.get_state(legacy=False)
    return state["has_gauss"], state["gauss"]


@functools.cache
def _can_read() -> bool:
    """Return whether generators of both kinds have in their memory what they say; elsewhere than in CPython, no."""
    if sys.implementation.name != "cpython":
        return False
    python, bits = random.Random(1), np.random.MT19937(1)
    numpy = np.random.RandomState(bits)
    python.random()
    numpy.random_sample()
    is_pythons = _python_words(TwisterState(_python_memory(python), None)) == python.getstate()
    memory = _object_memory(numpy)
    numpy.standard_normal()  # makes two
    asked: Any = numpy.get_state(legacy=False)
    read = _numpy_words(TwisterState(_numpy_memory(bits), (asked["has_gauss"], asked["gauss"])))
    return is_pythons and pickle.dumps(read) == pickle.dumps(asked) and _object_memory(numpy) != memory
