"""Registry of schedules: one name per training schedule, as plans and configurations write it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from lightning_pipe.core.plan import Plan
from lightning_pipe.core.program import CopyingOrder, HostCopy, Layout, Options, Order
from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.foreign_names import OLD_NAMES, expected_names, set_twice
from lightning_pipe.schedule.construct.device_orders import without_padding
from lightning_pipe.schedule.construct.layout_shapes import SHAPES, Device, Shape, both_ways, looping, zigzag
from lightning_pipe.schedule.construct.stage_times import ChainTimes, unit_times
from lightning_pipe.schedule.formats.text import format_order, parse_order
from lightning_pipe.schedule.orders.bitpipe import bitpipe
from lightning_pipe.schedule.orders.breadth_first import breadth_first
from lightning_pipe.schedule.orders.chimera import chimera
from lightning_pipe.schedule.orders.controllable_memory import v_half, v_min
from lightning_pipe.schedule.orders.dualpipe import dualpipe, dualpipe_v
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS, gpipe
from lightning_pipe.schedule.orders.hanayo import hanayo
from lightning_pipe.schedule.orders.interleaved import interleaved
from lightning_pipe.schedule.orders.one_f_one_b import one_f_one_b
from lightning_pipe.schedule.orders.two_bp import most_joined, two_bp
from lightning_pipe.schedule.orders.zero_bubble import zb_h1, zb_h2
from lightning_pipe.schedule.orders.zero_bubble_v import zb_v
from lightning_pipe.schedule.search.greedy import greedy
from lightning_pipe.schedule.search.list_scheduling import pe
from lightning_pipe.schedule.search.milp import milp
from lightning_pipe.schedule.search.zero_bubble_v_greedy import zb_v_greedy


class ScheduleFunction(Protocol):
    """Decides the order of computes on every rank and nothing else."""

    def __call__(self, layout: Layout, microbatches: int, options: Options = ..., /) -> Order:
        """Return the computes of every rank in order."""
        ...


class TimedFunction(Protocol):
    """Decides the order of computes by what they take, and maybe the copies to the host."""

    def __call__(self, layout: Layout, microbatches: int, options: Options, times: ChainTimes, /) -> CopyingOrder:
        """Return the computes of every rank in order."""
        ...


@dataclass(frozen=True)
class Schedule:
    """A schedule that does not look at times.

    Attributes:
        order: decides the order.
        shape: layouts that it is made for.
        stages_per_device: stages per device that it is usually run with, the first being its default.
    """

    order: ScheduleFunction
    shape: Shape = looping
    stages_per_device: tuple[int, ...] = (1,)

    def layout(self, devices: Sequence[Device], stages_per_device: int | None = None) -> Layout:
        """Return the layout of this schedule for a row of devices."""
        return self.shape(devices, stages_per_device or self.stages_per_device[0])


@dataclass(frozen=True)
class TimedSchedule:
    """A schedule that looks at times.

    Attributes:
        order, shape, stages_per_device: as those of `Schedule`.
        is_slow: whether it takes seconds, so that planners try it only where it is wished.
        decides_copies: whether it decides which micro-batches are offloaded, and when, where stages can offload.
    """

    order: TimedFunction
    shape: Shape = looping
    stages_per_device: tuple[int, ...] = (1,)
    is_slow: bool = False
    decides_copies: bool = False

    def layout(self, devices: Sequence[Device], stages_per_device: int | None = None) -> Layout:
        """Return the layout of this schedule for a row of devices."""
        return self.shape(devices, stages_per_device or self.stages_per_device[0])


SCHEDULES: dict[str, Schedule | TimedSchedule] = {
    "gpipe": Schedule(gpipe),
    "1f1b": Schedule(one_f_one_b),
    "interleaved": Schedule(interleaved, looping, (2, 4)),
    "breadth_first": Schedule(breadth_first, looping, (2, 4)),
    "zb_h1": Schedule(zb_h1, looping, (1, 2)),
    "zb_h2": Schedule(zb_h2),
    "2bp": Schedule(two_bp),
    "zb_v": Schedule(zb_v, zigzag, (2,)),
    "chimera": Schedule(chimera, both_ways),
    "hanayo": Schedule(hanayo, zigzag, (2, 4)),
    "bitpipe": Schedule(bitpipe, both_ways, (2,)),
    "dualpipe": Schedule(dualpipe, both_ways),
    "dualpipe_v": Schedule(dualpipe_v, zigzag, (2,)),
    "zb_v_greedy": TimedSchedule(zb_v_greedy, zigzag, (2,)),
    "v_half": Schedule(v_half, zigzag, (2,)),
    "v_min": Schedule(v_min, zigzag, (2,)),
    "pe": TimedSchedule(pe, looping, (1, 2)),
    "greedy": TimedSchedule(greedy, looping, (1, 2)),
    "milp": TimedSchedule(milp, is_slow=True, decides_copies=True),
}
ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_h2", "2bp", "zb_v", "chimera", "hanayo", "bitpipe",
    "dualpipe", "dualpipe_v", "zb_v_greedy", "v_half", "v_min", "pe", "greedy", "milp",
]  # fmt: skip


def register_schedule(
    name: str,
    order: ScheduleFunction,
    *,
    shape: str = "looping",
    stages_per_device: Sequence[int] = (1,),
    chunks: Sequence[int] | None = None,
) -> None:
    """Add a schedule of your own, for use by name in plans, configurations and the command line.

    Its orders are verified before they are simulated or run. Register it on every rank, for example next to the module.

    Args:
        name: a new name.
        order: returns the passes of every rank, in order, for a layout, a number of micro-batches and options.
        shape: layouts that it supports: "looping", "zigzag" or "both ways" (see `schedule.construct.layout_shapes`).
        stages_per_device: numbers of stages per device that planners may try, the first being the default.
        chunks: the old name of `stages_per_device`.

    Raises:
        ConfigError: if the name is taken, the shape unknown, or a number of stages below one.
    """
    if chunks is not None and tuple(stages_per_device) != (1,):
        raise set_twice("chunks", "stages_per_device")
    if chunks is not None:
        warnings.warn(OLD_NAMES["chunks"].note("chunks"), FutureWarning, stacklevel=2)
        stages_per_device = chunks
    if name in SCHEDULES:
        raise ConfigError(f"the schedule {name!r} exists already; expected a new name")
    if shape not in SHAPES:
        raise ConfigError(f"found shape={shape!r}; {expected_names(shape, SHAPES)}")
    if not stages_per_device or min(stages_per_device) < 1:
        raise ConfigError(f"found stages_per_device={tuple(stages_per_device)}; expected one or more numbers from 1")
    SCHEDULES[name] = Schedule(order, SHAPES[shape], tuple(stages_per_device))


def order_of(
    schedule: str, *, layout: Layout, microbatches: int, options: Options = NO_OPTIONS, times: ChainTimes | None = None
) -> CopyingOrder:
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
        raise ConfigError(f"found schedule={schedule!r}; {expected_names(schedule, SCHEDULES)}")
    match SCHEDULES[schedule]:
        case Schedule() as fixed:
            return fixed.order(layout, microbatches, options)
        case TimedSchedule() as timed:
            return timed.order(layout, microbatches, options, times or unit_times(layout))


def planned_order(plan: Plan, *, microbatches: int) -> CopyingOrder:
    """Return the order that a plan decides for a batch.

    Args:
        plan: the plan.
        microbatches: number of micro-batches, at most those of the plan.

    Raises:
        ConfigError: if its schedule or one of its options is unknown, or does not suit its layout.
        PlanError: if its order cannot be read, or is of fewer micro-batches.
    """
    if not plan.order:
        return order_of(plan.schedule, layout=plan.layout, microbatches=microbatches, options=plan.options)
    order = parse_order(plan.order)
    known = 1 + max((compute.microbatch for line in order for compute in line), default=-1)
    if microbatches > known:
        raise PlanError(
            f"The plan's order is of {known} micro-batches; expected at least {microbatches}. Change `microbatches` of "
            "the plan, or remove `order` if its schedule may decide."
        )
    return without_padding(order, microbatches)


def planned_join(plan: Plan) -> int:
    """Return how many micro-batches' W may be one product under a plan, for `lower`; 1 for none.

    Raises:
        ConfigError: as `join_of`.
    """
    return join_of(plan.schedule, plan.options)


def join_of(schedule: str, options: Options) -> int:
    """Return how many micro-batches' W may be one product under the named schedule, for `lower`; 1 for none.

    Raises:
        ConfigError: if an option of a schedule that can join is unknown or unreadable.
    """
    return most_joined(options) if schedule == "2bp" else 1


def options_with_forwards_first(schedule: str) -> Options:
    """Return the options under which the named schedule runs all forwards first, where some decide that."""
    return {"base": "gpipe"} if schedule == "2bp" else NO_OPTIONS


def joined(plan: Plan) -> Plan | None:
    """Return a plan with W of as many micro-batches as there are in one product; None if its schedule joins none."""
    can_join = plan.schedule == "2bp"
    return replace(plan, options={**plan.options, "join": plan.microbatches}) if can_join else None


def needs_times(plan: Plan) -> bool:
    """Return whether the order of a plan is still to be decided by times."""
    return not plan.order and isinstance(SCHEDULES.get(plan.schedule), TimedSchedule)


def with_order(plan: Plan, times: ChainTimes) -> Plan:
    """Return the plan with the order that its schedule decides by these times.

    Where it decides about copies too, a stage of which it copies nothing offloads nothing.

    Raises:
        ConfigError: as `order_of`.
    """
    layout, count = plan.layout, plan.microbatches
    order = order_of(plan.schedule, layout=layout, microbatches=count, options=plan.options, times=times)
    if decides_copies(plan):
        copied = {x.stage for line in order for x in line if isinstance(x, HostCopy)}
        stages = tuple(stage if s in copied else replace(stage, offload=()) for s, stage in enumerate(plan.stages))
        plan = replace(plan, stages=stages)
    return replace(plan, order=format_order(order))


def decides_copies(plan: Plan) -> bool:
    """Return whether the schedule of a plan decides which micro-batches are offloaded."""
    schedule = SCHEDULES.get(plan.schedule)
    return isinstance(schedule, TimedSchedule) and schedule.decides_copies


def stages_placed(plan: Plan) -> frozenset[int]:
    """Return the stages whose copies have places in the order of a plan.

    Raises:
        PlanError: if its order cannot be read.
    """
    return frozenset(x.stage for line in parse_order(plan.order) for x in line if isinstance(x, HostCopy))
