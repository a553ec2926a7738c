"""Timeline: when each instruction ran or will run. One type for simulated and recorded runs.

`Timeline` times are seconds from a common zero. Bubble is defined once, here: idle time of a rank within its own span
(start of its first compute to end of its last), as a share of that span. Makespan is measured with the flush: from the
first start to the last end over all ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

from lightning_pipe.core.program import AnyCompute, Instruction


@dataclass(frozen=True)
class Event:
    """One instruction of one rank, from `start` to `end` in seconds."""

    rank: int
    instruction: Instruction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Events of all ranks, in order of rank and start.

    Attributes:
        events: as above.
        since: end of the step before, where it is known: what ranks begin ahead of it does not make a step longer.
    """

    events: tuple[Event, ...]
    since: float = -math.inf

    @property
    def ranks(self) -> tuple[int, ...]:
        """List the ranks that have events."""
        return tuple(sorted({event.rank for event in self.events}))

    @property
    def makespan(self) -> float:
        """Return the seconds from the first start to the last end over all ranks (with flush)."""
        if not self.events:
            return 0.0
        return max(event.end for event in self.events) - min(event.start for event in self.events)

    def computes(self, rank: int) -> tuple[Event, ...]:
        """List the compute events of a rank."""
        return self._computes.get(rank, ())

    @cached_property
    def _computes(self) -> dict[int, tuple[Event, ...]]:
        computes: dict[int, list[Event]] = defaultdict(list)
        for event in self.events:
            if isinstance(event.instruction, AnyCompute):
                computes[event.rank].append(event)
        return {rank: tuple(events) for rank, events in computes.items()}

    def span(self, rank: int) -> float:
        """Return the seconds from the start of a rank's first compute to the end of its last."""
        computes = self.computes(rank)
        return max(e.end for e in computes) - min(e.start for e in computes) if computes else 0.0

    def busy(self, rank: int) -> float:
        """Return the seconds a rank computes."""
        return sum(event.end - event.start for event in self.computes(rank))

    def bubble(self, rank: int) -> float:
        """Return the idle share of a rank's own span, between 0 and 1."""
        span = self.span(rank)
        return max(0.0, 1 - self.busy(rank) / span) if span else 0.0  # sums of seconds round

    def idle_with_flush(self, rank: int) -> float:
        """Return makespan minus busy time of a rank, in seconds: the measure of the published bubble formulas."""
        return self.makespan - self.busy(rank)
