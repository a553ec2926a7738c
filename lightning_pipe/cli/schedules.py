"""Schedules drawn and compared on devices of equal speed.

Every device holds an equal share of the model, in as many stages as the schedule wants; F, I and W of a share take the
seconds that are given, those of a stage its part of them. So schedules with different numbers of stages do the same
work, and their times are comparable. Every message between devices takes equally long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from lightning_pipe.cli.options import check_names, option
from lightning_pipe.cli.rounds import drawn_rounds
from lightning_pipe.core.program import Layout, Order, VerifiedProgram
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.errors import ConfigError, PipeError
from lightning_pipe.report import draw, mean_bubble
from lightning_pipe.report.table import text_of
from lightning_pipe.schedule import SCHEDULES, order_of
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.construct.device_orders import computes_only
from lightning_pipe.schedule.construct.stage_times import ChainTimes, unit_times
from lightning_pipe.schedule.formats.torch_csv import (
    layout_of,
    load_csv,
    microbatches_of,
    write_csv,
    write_csv_with_communication,
)
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import join_of
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import POLICIES
from lightning_pipe.simulator import UnitPrices, memory_curves, period, simulate
from lightning_pipe.units import counted_noun, format_share

_MOST_COLUMNS = 10_000
# Broken into lines, so that there is room for why there is none.
_HEADINGS = (
    "stages\nper device",
    "makespan",
    "without\nflush",
    "idle",
    "bubble",
    "kept,\nby device",
    "most\nshares",
    "parameters",
)


@dataclass(frozen=True)
class SchedulesOptions:
    """Draw and compare schedules on equal devices: time, idle time, and what they keep."""

    devices: int = option(4, "devices in a row")
    microbatches: int = option(8, "micro-batches per step")
    forward: float = option(1.0, "seconds of the forward of a device's share of the model, for one micro-batch")
    input: float = option(1.0, "seconds of its input gradients")
    weight: float = option(1.0, "seconds of its weight gradients")
    message: float = option(0.0, "seconds of a message from one device to another")
    fused: bool = option(
        False, "whether a backward that the schedule does not split sends its gradient only at its end"
    )
    schedule: str | None = option(None, "a single one, or a CSV file that lists it: it is drawn too; null compares all")
    stages_per_device: int | None = option(None, "stages per device; null is each schedule's own default")
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"meaning": "options of the single schedule: options={warmup: pb}"}
    )
    draw: bool = option(False, "whether all are drawn")
    csv: str | None = option(None, "file for the single schedule, as torch.distributed.pipelining reads it")
    communication: bool = option(False, "whether this file has sends and receives too")
    versions: str | None = option(
        None, "instead of schedules: policy of weight versions, of which two rounds are drawn; or all"
    )

    def __post_init__(self) -> None:
        for name in ("devices", "microbatches", "stages_per_device"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ConfigError(f"found {name}={count}; expected at least 1")
        for name in ("forward", "input", "weight", "message"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf or (name == "forward" and not seconds):
                raise ConfigError(f"found {name}={seconds:g}; expected seconds, and more than 0 for forward")
        self._check_schedule()
        if self.versions is not None:
            check_names("versions", (self.versions,), (*POLICIES, "all"))
            if idle := self._changed("schedule", "stages_per_device", "draw", "fused"):
                raise ConfigError(
                    f"found versions={self.versions} and {', '.join(idle)}; rounds run 1f1b on one stage per device, "
                    "and are drawn. Remove these."
                )
            if self.devices < 2:
                raise ConfigError(f"found devices={self.devices}; expected at least 2, as rounds are of pipelines")

    def _check_schedule(self) -> None:
        """Refuse an unknown schedule, and options that have no effect with this one, or with all."""
        if self.schedule is None:
            if idle := self._changed("options", "csv", "communication"):
                raise ConfigError(f"found {', '.join(idle)} without schedule=; expected the schedule that is meant")
        elif not _is_file(self.schedule):
            check_names("schedule", (self.schedule,), tuple(SCHEDULES))
        elif decided := self._changed("devices", "microbatches", "stages_per_device", "options"):
            raise ConfigError(
                f"found schedule={self.schedule} and {', '.join(decided)}; the file decides these. Remove them."
            )

    def _changed(self, *names: str) -> list[str]:
        """List which of these options do not have their defaults."""
        defaults = SchedulesOptions.__dataclass_fields__
        return [name for name in names if getattr(self, name) not in (defaults[name].default, {})]


@dataclass(frozen=True)
class Shown:
    """A schedule, proved and simulated.

    Attributes:
        name: of the schedule.
        order: what it decides.
        program: the proved program of this order.
        timeline: when it runs.
        kept: most micro-batches that each device keeps at once, those of all its stages added.
        ahead_s: seconds from step to step if no device waits for the others in between.
    """

    name: str
    order: Order
    program: VerifiedProgram
    timeline: Timeline
    kept: tuple[int, ...]
    ahead_s: float

    @property
    def layout(self) -> Layout:
        """Return the ranks of each stage."""
        return self.program.layout

    @property
    def copies(self) -> float:
        """Return how often the devices together hold the parameters."""
        return sum(map(len, self.layout.stages)) / len(self.layout.stages)

    @property
    def shares(self) -> tuple[float, ...]:
        """Return what each device keeps, in micro-batches of its share of the model."""
        return tuple(kept / _stages_per_share(self.layout) for kept in self.kept)

    def stages(self, rank: int) -> tuple[int, ...]:
        """List the stages of a device."""
        return tuple(stage for stage, ranks in enumerate(self.layout.stages) if rank in ranks)

    @property
    def idle(self) -> float:
        """Return the mean seconds for which devices are idle from the first start to the last end."""
        return sum(map(self.timeline.idle_with_flush, self.timeline.ranks)) / self.layout.ranks

    @property
    def bubble(self) -> float:
        """Return the mean bubble of the devices."""
        return mean_bubble(self.timeline)

    @property
    def drawing(self) -> str:
        """Return the computes as text, in columns of the shortest as long as there are not too many."""
        computes = (event for rank in self.timeline.ranks for event in self.timeline.computes(rank))
        shortest = min(e.end - e.start for e in computes if e.end > e.start)
        return draw(self.timeline, unit=max(shortest, self.timeline.makespan / _MOST_COLUMNS))


def shown(name: str, options: SchedulesOptions) -> Shown:
    """Simulate a schedule.

    Args:
        name: of the schedule, or the path of a CSV file that lists one.
        options: devices, micro-batches and times.

    Raises:
        PipeError: if there is no such schedule for these devices, stages or options.
    """
    if _is_file(name):
        order = load_csv(name)
        return _simulated(name, order, layout_of(order), options)
    layout = SCHEDULES[name].layout([(device,) for device in range(options.devices)], options.stages_per_device)
    times = _times(layout, _prices(layout, options))
    found = order_of(name, layout=layout, microbatches=options.microbatches, options=options.options, times=times)
    return _simulated(name, computes_only(found), layout, options)


def _simulated(name: str, order: Order, layout: Layout, options: SchedulesOptions) -> Shown:
    sizes, traffic, prices = (1,) * microbatches_of(order), chain(len(layout.stages)), _prices(layout, options)
    join = join_of(name, options.options)
    program, ahead = (
        verify(
            lower(
                order,
                layout=layout,
                sizes=sizes,
                traffic=traffic,
                split=not options.fused,
                join=join,
                confirms=confirms,
            )
        )
        for confirms in (False, True)
    )
    timeline = simulate(program, prices)
    curves = memory_curves(timeline, program=program, prices=prices)
    kept = tuple(curve.peak_in_flight for curve in curves)
    return Shown(name, order, program, timeline, kept, period(ahead, prices))


def _is_file(schedule: str) -> bool:
    return schedule.endswith(".csv")


def _stages_per_share(layout: Layout) -> float:
    """Return how many stages a device's share of the model has."""
    return len(layout.stages) / layout.ranks


def _prices(layout: Layout, options: SchedulesOptions) -> UnitPrices:
    parts = _stages_per_share(layout)
    return UnitPrices(options.forward / parts, options.input / parts, options.weight / parts, latency=options.message)


def _times(layout: Layout, prices: UnitPrices) -> ChainTimes:
    """Return what a schedule that looks at times sees."""
    stages = len(layout.stages)
    links = tuple(0.0 if one == other else prices.latency for one, other in pairwise(layout.stages))
    return replace(
        unit_times(layout),
        forward_s=(prices.forward,) * stages,
        input_s=(prices.input_grad,) * stages,
        weight_s=(prices.weight_grad,) * stages,
        ahead_s=links,
        back_s=links,
    )


def run_schedules(options: SchedulesOptions, width: int) -> Iterator[str]:
    """Yield a table of all schedules, and their drawings where they are wanted; those of a single one; or rounds."""
    if options.versions is not None:
        layout = Layout(tuple((device,) for device in range(options.devices)))
        for name in POLICIES if options.versions == "all" else (options.versions,):
            yield drawn_rounds(name, layout, options.microbatches, _prices(layout, options))
        return
    if options.schedule is not None:
        single = shown(options.schedule, options)
        yield _summary({single.name: single}, width)
        yield from _drawn(single, width)
        if options.csv is not None:
            yield _written(single, options.csv, with_communication=options.communication)
        return
    found = {name: _attempt(name, options) for name in SCHEDULES}
    yield _summary(found, width)
    for one in found.values():
        if options.draw and isinstance(one, Shown):
            yield from _drawn(one, width)


def _attempt(name: str, options: SchedulesOptions) -> Shown | str:
    try:
        return shown(name, options)
    except PipeError as error:
        return str(error)


def _summary(found: Mapping[str, Shown | str], width: int) -> str:
    some = next(one for one in found.values() if isinstance(one, Shown))
    devices, microbatches = some.layout.ranks, len(some.program.sizes)
    work_s = sum(map(some.timeline.busy, some.timeline.ranks)) / devices
    title = f"{devices} devices, {counted_noun(microbatches, 'micro-batch')}: {work_s:.4g} s of work per device"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    table.add_column("schedule", no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading, justify="right", overflow="fold")
    if any(isinstance(one, str) for one in found.values()):
        table.add_column("none because", overflow="fold", ratio=1)
    for name, one in found.items():
        if isinstance(one, str):
            table.add_row(name, *("-",) * len(_HEADINGS), escape(one))
            continue
        table.add_row(
            name,
            str(max(len(one.stages(rank)) for rank in range(devices))),
            f"{one.timeline.makespan:.4g} s",
            f"{one.ahead_s:.4g} s",
            f"{one.idle:.4g} s",
            format_share(one.bubble),
            " ".join(map(str, one.kept)),
            f"{max(one.shares):.4g}",
            f"{one.copies:g}x",
        )
    return text_of(table, width)


def _drawn(one: Shown, width: int) -> Iterator[str]:
    yield f"{one.name}\n{one.drawing}"
    table = Table(box=box.SIMPLE)
    for heading in ("device", "stages", "computes", "bubble", "idle with flush", "kept", "shares"):
        table.add_column(heading, justify="right")
    timeline = one.timeline
    for rank in timeline.ranks:
        table.add_row(
            str(rank),
            ",".join(map(str, one.stages(rank))),
            f"{timeline.busy(rank):.4g} s",
            format_share(timeline.bubble(rank)),
            f"{timeline.idle_with_flush(rank):.4g} s",
            str(one.kept[rank]),
            f"{one.shares[rank]:.4g}",
        )
    yield text_of(table, width)


def _written(one: Shown, path: str, *, with_communication: bool) -> str:
    text = write_csv_with_communication(one.program) if with_communication else write_csv(one.order)
    try:
        Path(path).write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"cannot write the schedule: {error}. Change csv=, or set csv=null.") from None
    return f"Wrote {one.name} to {path}, a row per rank as torch.distributed.pipelining reads it."
