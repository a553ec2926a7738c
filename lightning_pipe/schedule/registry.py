"""Which schedules exist? One name per training schedule, as plans and configurations write it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_pipe.core.program import Layout, Options, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.gpipe import NO_OPTIONS, gpipe
from lightning_pipe.schedule.one_f_one_b import one_f_one_b
from lightning_pipe.schedule.options import hint
from lightning_pipe.schedule.shapes import Device, Shape, looping
from lightning_pipe.schedule.times import Times, unit_times


class ScheduleFunction(Protocol):
    """Decides the order of computes on every rank and nothing else."""

    def __call__(self, layout: Layout, microbatches: int, options: Options = ..., /) -> Order:
        """Return the computes of every rank in order."""
        ...


class TimedFunction(Protocol):
    """Decides the order of computes by what they take."""

    def __call__(self, layout: Layout, microbatches: int, options: Options, times: Times, /) -> Order:
        """Return the computes of every rank in order."""
        ...


@dataclass(frozen=True)
class Schedule:
    """A schedule that does not look at times.

    Attributes:
        order: decides the order.
        shape: layouts that it is made for.
        chunks: stages per device that it is usually run with, the first being its default.
    """

    order: ScheduleFunction
    shape: Shape = looping
    chunks: tuple[int, ...] = (1,)

    def layout(self, devices: Sequence[Device], chunks: int | None = None) -> Layout:
        """Return the layout of this schedule for a row of devices."""
        return self.shape(devices, chunks or self.chunks[0])


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule that looks at times; attributes as those of `Schedule`."""

    order: TimedFunction
    shape: Shape = looping
    chunks: tuple[int, ...] = (1,)

    def layout(self, devices: Sequence[Device], chunks: int | None = None) -> Layout:
        """Return the layout of this schedule for a row of devices."""
        return self.shape(devices, chunks or self.chunks[0])


SCHEDULES: dict[str, Schedule | TimedSchedule] = {
    "gpipe": Schedule(gpipe),
    "1f1b": Schedule(one_f_one_b),
}


def order_of(
    schedule: str, *, layout: Layout, microbatches: int, options: Options = NO_OPTIONS, times: Times | None = None
) -> Order:
    """Return the order that the named schedule decides.

    Args:
        schedule: its name.
        layout: ranks of each stage.
        microbatches: number of micro-batches, at least 1.
        options: options of the schedule.
        times: of the pipeline, for schedules that look at them; by default unit times.

    Raises:
        ConfigError: if the schedule or one of its options is unknown, or it does not suit the layout.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"no schedule {schedule!r}; schedules: {', '.join(SCHEDULES)}" + hint(schedule, SCHEDULES))
    match SCHEDULES[schedule]:
        case Schedule() as fixed:
            return fixed.order(layout, microbatches, options)
        case TimedSchedule() as timed:
            return timed.order(layout, microbatches, options, times or unit_times(layout))
