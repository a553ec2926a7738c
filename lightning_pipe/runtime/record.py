"""Recorder of the instructions of this rank: two clock reads per instruction.

A receive lasts from its posting until the compute that needs it has seen it arrive, a reduction from its posting until
`Step` has seen it end; computes, loads and the step itself last as long as they run, waiting excluded. A send is only
marked where it was posted: the receiver's event is that of the message.

Times are seconds since the Unix epoch, so that the timelines of ranks on hosts with synchronised clocks can simply be
put together. On an accelerator the clock is that of the device's events, tied to the epoch once per program.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

from lightning_pipe.core.program import Instruction
from lightning_pipe.core.timeline import Event, Timeline

Mark: TypeAlias = "float | torch.cuda.Event"
_TRIES = 5  # to read two clocks at once, since the process may lose its core in between


class Clock(Protocol):
    """Take marks now, and turn them into seconds since the epoch later."""

    def mark(self) -> Mark:
        """Return the present moment."""
        ...

    def seconds(self, mark: Mark) -> float:
        """Return a mark in seconds since the epoch."""
        ...


class HostClock:
    """Read the host's monotonic clock, tied to the epoch where two readings of it are closest around one of that."""

    def __init__(self) -> None:
        readings = [(time.perf_counter(), time.time(), time.perf_counter()) for _ in range(_TRIES)]
        before, epoch, after = min(readings, key=lambda reading: reading[2] - reading[0])
        self._zero = epoch - (before + after) / 2

    def mark(self) -> Mark:
        """Return the present moment."""
        return time.perf_counter()

    def seconds(self, mark: Mark) -> float:
        """Return a mark in seconds since the epoch."""
        assert isinstance(mark, float)
        return self._zero + mark


class CudaClock:
    """Record events on the current stream; waits for that once, to tie the device's clock to the epoch."""

    def __init__(self) -> None:
        self._first = _event()
        self._first.record()
        self._first.synchronize()
        self._zero = time.time()

    def mark(self) -> Mark:
        """Return the present moment of the stream."""
        event = _event()
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        """Return a mark in seconds since the epoch; waits for the device to reach it."""
        assert isinstance(mark, torch.cuda.Event)
        mark.synchronize()
        milliseconds: float = self._first.elapsed_time(mark)
        return self._zero + milliseconds / 1000


@dataclass
class Recorder:
    """Collect the events of one rank during one program; `clock` None records nothing.

    `held_bytes` says what the rank holds, and is asked after every instruction that changes it; None asks nobody.
    """

    rank: int
    clock: Clock | None
    held_bytes: Callable[[], int] | None = None
    _marks: list[tuple[Instruction, Mark, Mark]] = field(default_factory=list)
    _memory: list[tuple[Mark, int]] = field(default_factory=list)

    def mark(self) -> Mark:
        """Return the present moment (0 when nothing is recorded)."""
        return self.clock.mark() if self.clock is not None else 0.0

    def add(self, instruction: Instruction, start: Mark) -> None:
        """Note that an instruction that began at `start` has ended now."""
        if self.clock is not None:
            self._marks.append((instruction, start, self.clock.mark()))

    def put(self, instruction: Instruction, start: Mark, end: Mark) -> None:
        """Note when an instruction ran that somebody else has timed."""
        if self.clock is not None:
            self._marks.append((instruction, start, end))

    def note_memory(self) -> None:
        """Note what is held now."""
        if self.clock is not None and self.held_bytes is not None:
            self._memory.append((self.clock.mark(), self.held_bytes()))

    def memory(self) -> tuple[tuple[float, int], ...]:
        """Return times and the bytes held from then on."""
        clock = self.clock
        return tuple((clock.seconds(mark), held) for mark, held in self._memory) if clock is not None else ()

    def timeline(self) -> Timeline:
        """Return the events, in order of start."""
        clock = self.clock
        if clock is None:
            return Timeline(())
        events = [
            Event(self.rank, instruction, clock.seconds(start), clock.seconds(end))
            for instruction, start, end in self._marks
        ]
        return Timeline(tuple(sorted(events, key=lambda event: event.start)))


def clock_of(device: torch.device) -> Clock:
    """Return the clock that sees the work of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
