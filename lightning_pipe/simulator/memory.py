"""How much do the ranks keep for the backward, and when? From the start of F until Free.

Counted is what a stage saves for its backward (`Prices.saved_bytes`). Parameters, gradients, optimizer state, buffers
of messages and the working memory of a compute are left out: they do not depend on the order of computes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

from lightning_pipe.core.prices import Prices
from lightning_pipe.core.program import Compute, Free, Program
from lightning_pipe.core.timeline import Event, Timeline


@dataclass(frozen=True)
class MemoryCurve:
    """What one rank keeps over time.

    Attributes:
        times: seconds at which the amount changes, rising.
        held_bytes: bytes kept from each of these times on.
        in_flight: micro-batches (of all stages of the rank together) kept from each of these times on.
    """

    times: tuple[float, ...]
    held_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes kept at once."""
        return max(self.held_bytes, default=0)

    @property
    def peak_in_flight(self) -> int:
        """Return the most micro-batches kept at once."""
        return max(self.in_flight, default=0)


def memory_curves(timeline: Timeline, *, program: Program, prices: Prices) -> tuple[MemoryCurve, ...]:
    """Return what every rank keeps over time.

    Args:
        timeline: simulated or recorded times of the program.
        program: the program, for the samples of each replica.
        prices: bytes kept per stage and samples.
    """
    lines: dict[int, list[Event]] = defaultdict(list)
    for event in timeline.events:
        lines[event.rank].append(event)
    return tuple(_curve(lines[rank], rank, program, prices) for rank in range(len(program.ranks)))


def _curve(events: list[Event], rank: int, program: Program, prices: Prices) -> MemoryCurve:
    changes: list[tuple[float, int, int]] = []
    for event in events:
        match event.instruction:
            case Compute(stage, "F", microbatch):
                changes.append((event.start, _kept(stage, microbatch, rank, program, prices), 1))
            case Free(stage, microbatch):
                changes.append((event.start, -_kept(stage, microbatch, rank, program, prices), -1))
            case _:
                pass
    changes.sort(key=lambda change: (change[0], change[2]))  # what ends at a time makes room for what starts then
    return MemoryCurve(
        times=tuple(time for time, _, _ in changes),
        held_bytes=tuple(accumulate(size for _, size, _ in changes)),
        in_flight=tuple(accumulate(count for _, _, count in changes)),
    )


def _kept(stage: int, microbatch: int, rank: int, program: Program, prices: Prices) -> int:
    replica = program.layout.stages[stage].index(rank)
    return prices.saved_bytes(stage, len(program.layout.samples(stage, replica, microbatch, program.sizes[microbatch])))
