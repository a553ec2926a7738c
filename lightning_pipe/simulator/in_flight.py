"""Messages under way: how many a rank keeps memory for beside a compute.

Where a device carries messages, the host queues a whole step before it sees the first of them land, and what was sent
is kept until then. So before a compute a rank waits, on the device, for its oldest sends, until no more messages are
under way than in the simulated timeline. That timeline keeps all these orders, so none of the waits closes a circle
as long as messages move as soon as both ends are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import AnyCompute, Instruction, Pass, Recv, Send, VerifiedProgram
from lightning_pipe.core.timeline import Event
from lightning_pipe.simulator.simulate import simulate
from lightning_pipe.simulator.unit_prices import UnitPrices

Use: TypeAlias = tuple[int, Pass, int]  # stage, direction, micro-batch: the compute that takes a message


@dataclass(frozen=True)
class _EqualTimes(UnitPrices):
    """What is known of times without a profile: each half of a compute and each message take as long as a forward."""

    latency: float = 1.0

    def own_work_s(self, work: OwnWork, rank: int, samples: int) -> float:
        """Return nothing, whatever the work is."""
        return 0.0


def messages_under_way(program: VerifiedProgram) -> tuple[int, ...]:
    """Return by rank the most messages under way beside a compute.

    They are the sends from the oldest that has not arrived to the newest, and the receives from their place in the
    list to the compute that takes them.
    """
    times = {(event.rank, event.instruction): event for event in simulate(program, _EqualTimes()).events}
    return tuple(max(_counts(program, rank, times), default=0) for rank in range(len(program.ranks)))


def _counts(program: VerifiedProgram, rank: int, times: Mapping[tuple[int, Instruction], Event]) -> Iterator[int]:
    """Yield how many messages of a rank are under way beside each of its computes."""
    arrivals, oldest = list[float](), 0
    receives: Counter[Use] = Counter()
    for instruction in program.ranks[rank]:
        match instruction:
            case AnyCompute():
                if (direction := instruction.direction) is not None:
                    for microbatch in instruction.microbatches:
                        receives.pop((instruction.stage, direction, microbatch), None)
                now = times[rank, instruction].start
                while oldest < len(arrivals) and arrivals[oldest] <= now:
                    oldest += 1
                yield len(arrivals) - oldest + receives.total()
            case Recv(message):
                receives[message.target, message.direction, message.microbatch] += 1
            case Send():
                arrivals.append(times[rank, instruction].end)
            case _:
                pass
