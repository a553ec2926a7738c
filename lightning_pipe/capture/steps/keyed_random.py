"""Keyed random numbers: every random node draws by its key, so that draws do not depend on cuts and schedules.

The key is (seed, step, micro-batch, first sample of the slice, number of the node among the graph's random nodes), so
stages, schedule and recomputation do not change what is drawn, and the surrounding random stream stays as it was;
replicas that share a micro-batch draw for their own samples. A step on a device may draw on the host, too
(`torch.rand(()).item()`, indices), so there are two generators then.

`Randomness` is the state of all generators of a process, for those who go on with it elsewhere or give it back.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lightning_pipe.capture.python.twisters import (
    TwisterState,
    numpy_state,
    python_state,
    set_numpy_state,
    set_python_state,
)
from lightning_pipe.capture.steps.stage_program import RandomKey


def seed_of(key: RandomKey, node: int) -> int:
    """Return the 63-bit seed of one random node."""
    packed = struct.pack("<5q", key.seed, key.step, key.microbatch, key.first_sample, node)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def keyed(
    operation: Callable[..., Any], node: int, device: torch.device, *, by_batch: bool = False
) -> Callable[..., Any]:
    """Return the operation with the key as its first argument, drawing from generators that are seeded for it.

    Args:
        operation, node, device: what draws, its number, and where.
        by_batch: whether all micro-batches of a batch draw the same.
    """

    def draw(key: RandomKey, *args: Any, **kwargs: Any) -> Any:
        seed = seed_of(key.of_batch if by_batch else key, node)
        for generator in _generators(device):
            generator.manual_seed(seed)
        return operation(*args, **kwargs)

    draw.operation = operation  # type: ignore[attr-defined]
    draw.__name__ = f"keyed_{getattr(operation, '_opname', 'random')}_{node}"
    return draw


def drawn_operation(function: Any) -> Any:
    """Return the operation of what `keyed` returned, None for any other function."""
    return getattr(function, "operation", None) if getattr(function, "__name__", "").startswith("keyed_") else None


def _generators(device: torch.device) -> tuple[torch.Generator, ...]:
    """Return the generators of a device and of the host."""
    if device.type != "cuda":
        return (torch.default_generator,)
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.default_generator, torch.cuda.default_generators[index]


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Give torch's generators, of a device and of the host, their states back."""
    before = [(generator, generator.get_state()) for generator in _generators(device)]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)


@dataclass(frozen=True)
class PythonRandomness:
    """State of the generators of Python and NumPy."""

    python: TwisterState
    numpy: TwisterState

    @classmethod
    def now(cls) -> PythonRandomness:
        """Return the present state."""
        return cls(python_state(), numpy_state())

    def restore(self) -> None:
        """Set the state."""
        set_python_state(self.python)
        set_numpy_state(self.numpy)


@dataclass(frozen=True)
class Randomness:
    """State of the generators of a process: torch's (of the host, and of a device), Python's and NumPy's."""

    states: tuple[bytes, ...]
    python: PythonRandomness

    @classmethod
    def now(cls, device: torch.device) -> Randomness:
        """Return the present state."""
        states = (generator.get_state().numpy().tobytes() for generator in _generators(device))
        return cls(tuple(states), PythonRandomness.now())

    def restore(self, device: torch.device) -> None:
        """Set the state."""
        for generator, state in zip(_generators(device), self.states, strict=True):
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        self.python.restore()
