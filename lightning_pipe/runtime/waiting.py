"""Waiting of a rank: a coroutine yields what it waits for, so that one walk of a program serves two drivers.

    drive(walk, wait=...)     one process per rank: wait for each handle in turn (`watch` adds deadline and alarms)
    drive_together(walks)     all ranks in one thread (local transport): resume whichever rank's handle is done

A walk is a generator that yields `Wait`s and returns its result.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from lightning_pipe.core.program import Instruction
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.guard.failure import MESSAGE

_PATIENCE_S = 1.0  # of one wait for what will end


class Handle(Protocol):
    """A transfer or collective under way."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long; return whether the data may be used (on a device: by work queued from now on).

        Raises:
            RuntimeError: if the peer or the connection is gone.
        """
        ...

    def landed(self) -> bool:
        """Return whether the data is really there. Differs from a successful `wait` where a device queues it."""
        ...


class Independent:
    """Mark the handles of what ends some day whatever other ranks do, such as a copy to the host."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long; return whether the data may be used."""
        raise NotImplementedError

    def landed(self) -> bool:
        """Return whether the data is really there."""
        raise NotImplementedError


class Done:
    """The handle of something that needs no waiting."""

    def wait(self, timeout_s: float) -> bool:
        """Return True."""
        return True

    def landed(self) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True)
class Wait:
    """What a rank waits for: the handle, and the instruction (or the words) that an error will name.

    Attributes:
        kind: whether it is part of a program, or an exchange of two ranks or all beside programs.
        number: of the exchange, among those that all ranks begin in one order; 0 for none of them.
        peer: the other rank of an exchange of two; -1 otherwise.
    """

    handle: Handle
    what: Instruction | str
    kind: int = MESSAGE
    number: int = 0
    peer: int = -1


T = TypeVar("T")
Walk: TypeAlias = Generator[Wait, None, T]


def drive(walk: Walk[T], *, wait: Callable[[Wait], None]) -> T:
    """Run a walk to its end, calling `wait` for everything it waits for, and return its result."""
    while True:
        try:
            pending = next(walk)
        except StopIteration as stop:
            result: T = stop.value
            return result
        wait(pending)


def _ends_alone(handle: Handle) -> bool:
    """Wait for a handle that is done whatever other ranks do; return whether it is one."""
    while isinstance(handle, Independent) and not handle.wait(_PATIENCE_S):
        pass
    return isinstance(handle, Independent)


def drive_together(walks: Sequence[Walk[T]]) -> list[T]:
    """Run the walks of all ranks in this thread, each as far as its handles are done, and return their results.

    Raises:
        PipelineError: if every unfinished walk waits; the text says for what.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Wait] = {index: Wait(Done(), "its start") for index in range(len(walks))}
    while waiting:
        ready = [index for index, wait in waiting.items() if wait.handle.wait(0)]
        ready = ready or [index for index, wait in waiting.items() if _ends_alone(wait.handle)]
        if not ready:
            waits = "; ".join(f"rank {index} waits for {wait.what}" for index, wait in waiting.items())
            raise PipelineError(f"No rank can continue: {waits}. Is this program verified, and the same on all ranks?")
        for index in ready:
            try:
                waiting[index] = next(walks[index])
            except StopIteration as stop:
                results[index] = stop.value
                del waiting[index]
    return [results[index] for index in range(len(walks))]
