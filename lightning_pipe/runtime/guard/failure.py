"""Failures and states as guards tell them to each other."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

IDLE, OUTSIDE, INSIDE = 0, 1, 2  # modes: between fits; in a fit, but in no program; in a program or an opening
LEAVING = 3  # mode: at the exit of a script, after a fit that has failed
NO_WAIT, MESSAGE = 0, 1  # what a rank waits for: nothing, something in a program
PAIR, TOGETHER = 2, 3  # something that it exchanges with another rank, or with all, outside of programs


@dataclass(frozen=True)
class GuardedState:
    """What a rank does.

    Attributes:
        mode: `IDLE`, `OUTSIDE`, `INSIDE` or `LEAVING`.
        step: number of the batch, -1 before the first.
        at: the instruction, or words for what the rank does.
        waits: `NO_WAIT`, `MESSAGE`, `PAIR` or `TOGETHER`.
        waiting: what it waits for.
        count: of its waits outside of programs.
        number: of the exchange that it waits for, among those that all ranks begin in one order; 0 for none.
        peer: the rank that it waits for, where it is one; -1 otherwise.
        programs: that it has begun.
        exchanges: that it has begun, of those that all ranks begin in one order.
    """

    mode: int = IDLE
    step: int = -1
    at: str = "the start"
    waits: int = NO_WAIT
    waiting: str = ""
    count: int = 0
    number: int = 0
    peer: int = -1
    programs: int = 0
    exchanges: int = 0

    def __str__(self) -> str:
        waiting = f", waiting for {self.waiting}" if self.waits else ""
        if self.step < 0:
            return f"at {self.at}{waiting}, before the first step"
        if self.mode == INSIDE:
            return f"at {self.at}{waiting} of step {self.step}"
        return f"outside a program{waiting}, after {self.at} of step {self.step}"


UNHEARD = GuardedState(at="an unknown instruction")


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong anywhere.

    Attributes:
        rank: whose fault it is.
        where: what that rank did, as `str(State)` says it.
        cause: what happened.
        lines: of the user's code, if an error was raised.
        session: number of the fit in which it happened.
        raised: whether it is an error that the rank raises, which its own terminal will show.
        lasting: whether later fits fail for it too, because the rank is gone.
        late_s: seconds that have passed until anybody noticed.
        when: time of day, in seconds.
    """

    rank: int
    where: str
    cause: str
    lines: str = ""
    session: int = 0
    raised: bool = False
    lasting: bool = False
    late_s: float = 0.0
    when: float = field(default_factory=time.time)

    def __str__(self) -> str:
        verb = "died" if self.lasting else "failed"
        return f"Rank {self.rank} {verb} {self.where}: {self.cause}" + (f"\n{self.lines}" if self.lines else "")

    def packed(self) -> dict[str, Any]:
        """Return the fields, for a message."""
        return asdict(self)


def unpacked(fields: dict[str, Any]) -> Failure:
    """Return the failure of a message."""
    return Failure(**fields)
