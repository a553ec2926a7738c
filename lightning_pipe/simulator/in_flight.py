"""Sends under way: how many of a rank's messages have not arrived when it posts the next one.

Where a device carries messages, the host queues a whole step before it sees the first of them land, and what was sent
is kept until then. So a rank waits, on the device, for its oldest send before it posts one that the simulated timeline
would not have under way beside it. That timeline keeps all these orders, so none of the waits closes a circle, however
long things really take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import AnyCompute, Instruction, Send, VerifiedProgram
from lightning_pipe.simulator.simulate import simulate
from lightning_pipe.simulator.unit_prices import UnitPrices


@dataclass(frozen=True)
class _EqualTimes(UnitPrices):
    """What is known of times without a profile: each half of a compute and each message take as long as a forward."""

    latency: float = 1.0

    def own_work_s(self, work: OwnWork, rank: int, samples: int) -> float:
        """Return nothing, whatever the work is."""
        return 0.0


def sends_under_way(program: VerifiedProgram) -> tuple[int, ...]:
    """Return by rank the most sends from the oldest that has not arrived to the one that is posted; at least 1."""
    ends = {(event.rank, event.instruction): event.end for event in simulate(program, _EqualTimes()).events}
    return tuple(max(_windows(program, rank, ends), default=1) for rank in range(len(program.ranks)))


def _windows(program: VerifiedProgram, rank: int, ends: dict[tuple[int, Instruction], float]) -> Iterator[int]:
    """Yield for every send of a rank how many there are from the oldest under way to it."""
    now, arrivals, oldest = 0.0, list[float](), 0
    for instruction in program.ranks[rank]:
        match instruction:
            case AnyCompute():
                now = ends[rank, instruction]
            case Send():
                while oldest < len(arrivals) and arrivals[oldest] <= now:
                    oldest += 1
                arrivals.append(ends[rank, instruction])
                yield len(arrivals) - oldest
            case _:
                pass
