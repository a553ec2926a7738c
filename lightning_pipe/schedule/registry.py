"""Which schedules exist? One name per training schedule, as plans and configurations write it."""

from __future__ import annotations

from typing import Protocol

from lightning_pipe.core.program import Layout, Options, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.gpipe import NO_OPTIONS, gpipe
from lightning_pipe.schedule.one_f_one_b import one_f_one_b
from lightning_pipe.schedule.options import hint


class ScheduleFunction(Protocol):
    """A schedule: decides the order of computes on every rank and nothing else."""

    def __call__(self, layout: Layout, microbatches: int, options: Options = ..., /) -> Order:
        """Return the computes of every rank in order."""
        ...


SCHEDULES: dict[str, ScheduleFunction] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


def order_of(schedule: str, *, layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Return the order that the named schedule decides.

    Raises:
        ConfigError: if the schedule or one of its options is unknown.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"no schedule {schedule!r}; schedules: {', '.join(SCHEDULES)}" + hint(schedule, SCHEDULES))
    return SCHEDULES[schedule](layout, microbatches, options)
