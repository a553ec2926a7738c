"""Plots (PNG) of timelines and memory curves.

Needs matplotlib (`pip install 'lightning-pipe[plots]'`), which is imported where it is used. Figures are made and
written without pyplot, so that a notebook's or script's own figures and backend stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typing_extensions import assert_never

from lightning_pipe.core.effects import OWN_WORK, OwnWork, effects_of
from lightning_pipe.core.milestones import Milestone, milestone_effects
from lightning_pipe.core.program import AnyCompute, Recv, Reduce, Send, Step
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.errors import ConfigError
from lightning_pipe.report.account import flights, run_facts, step_interval
from lightning_pipe.report.trace import NO_CURVES, Curve, Curves, Notes
from lightning_pipe.units import BYTES, SECONDS, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# After Okabe and Ito (2008): told apart by colour-blind readers, and by their lightness in print.
COLOURS = {"F": "#56B4E9", "I": "#E69F00", "W": "#009E73", "B": "#D55E00"}
MEANINGS = {"F": "forward", "I": "backward, inputs", "W": "backward, weights", "B": "backward"}
REDUCE, STEP, MILESTONE = "#CC79A7", "#7F7F7F", "#000000"
MESSAGE = "#999999"
MEASURED, PREDICTED = "#0072B2", "#D55E00"
INK, PALE = "#333333", "#F2F2F2"
DPI = 150
WIDTH_IN = 13.0
LANE_IN = 0.42  # height of a rank's lane
PANEL_IN = 1.1  # height of a rank's memory
HEADROOM = 1.3  # above the highest curve, for the text
MARGIN_IN = 1.35  # title, axis and legend
BAR = 0.78  # of the height of a lane
Row = Literal["compute", "sum", "out", "back", "message"]
# Where bars begin, from the middle of their lane downwards, and their height.
ROWS: dict[Row, tuple[float, float]] = {
    "compute": (-BAR / 2, BAR),
    "sum": (0.4, 0.1),
    "message": (0.42, 0.05),
    "out": (-0.5, 0.05),
    "back": (-0.45, 0.05),
}
LETTER_IN = 0.075  # width of a digit at the size of the numbers
NAMES_IN = 1.1  # width of the names of the lanes
FADE = 0.45  # how much paler the second stage of a rank is than its first; later ones go further
TIME_UNITS = ("us", "ms", "s")
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
CAP_IN_SIGHT = 2.0  # a limit is drawn if it is at most so many times the largest peak, else written


def plot_timeline(
    timeline: Timeline,
    path: str | Path,
    *,
    predicted: Timeline | None = None,
    title: str = "",
    notes: Notes | None = None,
) -> None:
    """Draw a timeline as one lane per rank, with micro-batch numbers where they fit.

    Computes fill the lane; below them sums of gradients are a thin bar, as are copies to the host and back above them,
    and the optimizer step is grey. Stages of a rank that holds several are told apart by how pale they are.

    Args:
        timeline: simulated or recorded times of one or several steps.
        path: PNG file to write; its directory must exist.
        predicted: a simulated timeline to draw above a recorded one, on the same scale.
        title: what it is; makespan and bubble are added.
        notes: what is written behind micro-batches, such as the version of the weights that is read.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    panels = [(timeline, "")] if predicted is None else [(predicted, "predicted"), (timeline, "measured")]
    lanes = sum(len(panel.ranks) for panel, _ in panels)
    figure = figure_of(LANE_IN * lanes + MARGIN_IN * len(panels))
    heights = [len(panel.ranks) or 1 for panel, _ in panels]
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(end - start for start, end in (step_interval(panel) for panel, _ in panels))
    scale, unit = _scale(longest, SECONDS, TIME_UNITS)
    for axes, (panel, name) in zip(all_axes, panels, strict=True):
        axes.set_xlim(0, (longest or 1.0) * scale)
        _draw_lanes(axes, panel, scale, notes or {})
        axes.set_title(_heading(panel, title, name), loc="left", fontsize=11, color=INK)
    all_axes[-1].set_xlabel(f"time ({unit})", color=INK)
    _legend(figure, all_axes[-1], [panel for panel, _ in panels])
    figure.savefig(path, dpi=DPI)


def plot_memory(
    curves: Curves,
    path: str | Path,
    *,
    predicted: Curves = NO_CURVES,
    limits: Mapping[int, int] | None = None,
    names: Mapping[int, str] | None = None,
    title: str = "",
) -> None:
    """Draw bytes over time, one panel per rank on one scale, with the rank's limit.

    Args:
        curves: bytes over time by rank, measured or predicted.
        path: PNG file to write; its directory must exist.
        predicted: drawn as a line over the curves of the same ranks.
        limits: bytes that a rank may use; one that is far above all curves is written, not drawn.
        names: of panels that are no ranks.
        title: what it is.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    limits, names = limits or {}, names or {}
    everything = [*curves.values(), *predicted.values()]
    peak = max(map(_peak, everything))
    drawn = {rank: limit for rank, limit in limits.items() if limit <= CAP_IN_SIGHT * peak}
    top = max(peak, 1, *drawn.values()) * HEADROOM
    length = max(_end(group) - _start(group) for group in (curves, predicted))
    (size, unit), (scale, time_unit) = _scale(top, BYTES, BYTE_UNITS), _scale(length, SECONDS, TIME_UNITS)
    figure = figure_of(PANEL_IN * len(curves) + MARGIN_IN)
    all_axes = figure.subplots(len(curves), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, rank in zip(all_axes, sorted(curves), strict=True):
        times, amounts = _steps(curves[rank], curves, scale, size)
        axes.fill_between(times, amounts, step="post", color=COLOURS["F"], alpha=0.55, linewidth=0)
        axes.step(times, amounts, where="post", color=MEASURED, linewidth=1.0, label="measured" if predicted else None)
        if rank in predicted:
            line = _steps(predicted[rank], predicted, scale, size)
            axes.step(*line, where="post", color=PREDICTED, linewidth=1.2, linestyle=(0, (4, 2)), label="predicted")
        if rank in drawn:
            axes.axhline(drawn[rank] * size, color=INK, linewidth=1.2, label="limit")
        _memory_frame(axes, names.get(rank, f"rank {rank}"), curves[rank], limits.get(rank))
    all_axes[0].set_title(title, loc="left", fontsize=11, color=INK)
    all_axes[0].set(xlim=(0, length * scale or 1.0), ylim=(0, top * size))
    all_axes[-1].set_xlabel(f"time ({time_unit})", color=INK)
    figure.supylabel(unit, fontsize=10, color=INK)
    if predicted or drawn:
        handles, labels = max((axes.get_legend_handles_labels() for axes in all_axes), key=lambda found: len(found[0]))
        figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=DPI)


def figure_of(height: float) -> Figure:
    """Return an empty figure of the common width and a height in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "Plots were asked for, but matplotlib is not installed. Run pip install 'lightning-pipe[plots]'."
        ) from None
    return Figure(figsize=(WIDTH_IN, height), layout="constrained")


def _scale(largest: float, units: Mapping[str, float], names: Sequence[str]) -> tuple[float, str]:
    """Return by what to multiply such numbers, and the unit that they then have."""
    unit = max((name for name in names if units[name] <= largest), key=lambda name: units[name], default=names[0])
    return 1 / units[unit], unit


def _draw_lanes(axes: Axes, timeline: Timeline, scale: float, notes: Notes) -> None:
    start = step_interval(timeline)[0]
    for lane, rank in enumerate(timeline.ranks):
        axes.axhspan(lane - 0.5, lane + 0.5, color=PALE if lane % 2 else "white", zorder=0)
        events = [event for event in timeline.events if event.rank == rank]
        bars = list(_bars(events, _stages(timeline, rank), start=start, scale=scale, notes=notes))
        bars += [
            _Bar((flight.start - start) * scale, (flight.end - flight.start) * scale, MESSAGE, row="message")
            for flight in flights(timeline)
            if flight.receiver == rank
        ]
        for row, (top, height) in ROWS.items():
            chosen = [bar for bar in bars if bar.row == row]
            extents, colours = [(bar.left, bar.width) for bar in chosen], [bar.colour for bar in chosen]
            axes.broken_barh(
                extents, (lane + top, height), facecolors=colours, edgecolor="white", linewidth=0.4, zorder=2
            )
        _number(axes, bars, lane)
    axes.set_ylim(max(len(timeline.ranks), 1) - 0.5, -0.5)
    axes.set_yticks(range(len(timeline.ranks)), [_lane_name(timeline, rank) for rank in timeline.ranks])
    _frame(axes)


@dataclass(frozen=True)
class _Bar:
    """An event in the units of the axes."""

    left: float
    width: float
    colour: str
    text: str = ""
    row: Row = "compute"


def _bars(
    events: Sequence[Event], stages: Sequence[int], *, start: float, scale: float, notes: Notes
) -> Iterator[_Bar]:
    """Yield what is drawn of the events of one rank, which holds these stages."""
    for event in events:
        left, width = (event.start - start) * scale, (event.end - event.start) * scale
        match event.instruction:
            case AnyCompute() as compute:
                colour = _paler(COLOURS[compute.kind], stages.index(compute.stage))
                note = f"/{notes[event.rank, compute]}" if (event.rank, compute) in notes else ""
                yield _Bar(left, width, colour, "+".join(map(str, compute.microbatches)) + note)
            case Step():
                yield _Bar(left, width, STEP)
            case Reduce():
                yield _Bar(left, width, REDUCE, row="sum")
            case OwnWork() as work:
                effects = effects_of(work)
                if effects.label:
                    yield _Bar(left, width, effects.colour, row=effects.resource or "compute")
            case Milestone() as milestone:
                if milestone_effects(milestone).label:
                    yield _Bar(left, width, MILESTONE)
            case Send() | Recv():
                pass  # drawn as messages on their way
            case other:
                assert_never(other)


def _number(axes: Axes, bars: Sequence[_Bar], lane: int) -> None:
    """Write the numbers of micro-batches into the bars that have room for them."""
    first, last = axes.get_xlim()
    digit = LETTER_IN * (last - first) / (WIDTH_IN - NAMES_IN)
    for bar in bars:
        if bar.text and bar.width > digit * (len(bar.text) + 0.5):
            middle = bar.left + bar.width / 2
            axes.text(middle, lane, bar.text, ha="center", va="center_baseline", fontsize=7, color="black")


def _stages(timeline: Timeline, rank: int) -> list[int]:
    computes = [event.instruction for event in timeline.computes(rank)]
    return sorted({compute.stage for compute in computes if isinstance(compute, AnyCompute)})


def _lane_name(timeline: Timeline, rank: int) -> str:
    stages = _stages(timeline, rank)
    word = "stages" if len(stages) > 1 else "stage"
    return f"rank {rank}" + (f" · {word} {', '.join(map(str, stages))}" if stages else "")


def _paler(colour: str, times: int) -> str:
    """Return a colour mixed with white, further each time."""
    share = 1 - (1 - FADE) ** times
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in channels)


def _heading(timeline: Timeline, title: str, name: str) -> str:
    return ": ".join(part for part in (title, name, run_facts(timeline)) if part)


def _legend(figure: Figure, axes: Axes, timelines: Sequence[Timeline]) -> None:
    """Explain the colours that occur, below the last panel."""
    from matplotlib.patches import Patch

    instructions = [event.instruction for timeline in timelines for event in timeline.events]
    kinds = {instruction.kind for instruction in instructions if isinstance(instruction, AnyCompute)}
    patches = [Patch(color=COLOURS[kind], label=f"{kind}  {MEANINGS[kind]}") for kind in COLOURS if kind in kinds]
    if any(isinstance(instruction, Reduce) for instruction in instructions):
        patches.append(Patch(color=REDUCE, label="sum of gradients"))
    if any(isinstance(instruction, Recv) for instruction in instructions):
        patches.append(Patch(color=MESSAGE, label="message on its way"))
    kinds_of_work = {type(instruction) for instruction in instructions if isinstance(instruction, OwnWork)}
    drawn = [kind.effects for _, kind in sorted(OWN_WORK.items()) if kind in kinds_of_work and kind.effects.label]
    patches += [Patch(color=effects.colour, label=effects.label) for effects in drawn]
    if any(isinstance(event.instruction, Step) and event.end > event.start for t in timelines for event in t.events):
        patches.append(Patch(color=STEP, label="optimizer step"))
    if any(len(_stages(timeline, rank)) > 1 for timeline in timelines for rank in timeline.ranks):
        patches.append(Patch(color=_paler(STEP, 1), label="paler: a later stage of the rank"))
    if patches:
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)


def _frame(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0, colors=INK, labelsize=9)
    axes.tick_params(axis="x", colors=INK, labelsize=9)


def _memory_frame(axes: Axes, name: str, curve: Curve, limit: int | None) -> None:
    peak = f"{name} · peak {format_bytes(_peak(curve))}"
    of_limit = "" if limit is None else f" of {format_bytes(limit)}"
    axes.text(0.995, 0.97, peak + of_limit, transform=axes.transAxes, ha="right", va="top", fontsize=9, color=INK)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    _frame(axes)


def _peak(curve: Curve) -> int:
    return max((amount for _, amount in curve), default=0)


def _start(curves: Curves) -> float:
    return min((curve[0][0] for curve in curves.values() if curve), default=0.0)


def _end(curves: Curves) -> float:
    return max((curve[-1][0] for curve in curves.values() if curve), default=0.0)


def _steps(curve: Curve, curves: Curves, scale: float, size: float) -> tuple[list[float], list[float]]:
    """Return a curve in the units of the axes, from the start of the first to the end of the last of its group."""
    start, end = _start(curves), _end(curves)
    points = [*curve, (end, curve[-1][1])] if curve else []
    return [(time - start) * scale for time, _ in points], [amount * size for _, amount in points]
