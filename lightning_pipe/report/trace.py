"""How does a timeline look? As a trace for Perfetto or Chrome, and as a drawing in plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import ceil
from typing import TypeAlias

from lightning_pipe.core.program import Compute, Free, Instruction, Load, Recv, Reduce, Send, Step
from lightning_pipe.core.timeline import Event, Timeline

TraceEvent: TypeAlias = dict[str, str | int | float | dict[str, str]]

MICROSECONDS = 1e6  # the trace format counts in microseconds
MIDDLE = 0.5  # of a column of a drawing
LANES = ("compute", "send", "receive", "reduce")  # overlapping kinds of one rank lie on lanes of their own


def chrome_trace(timeline: Timeline) -> str:
    """Return a timeline as JSON that https://ui.perfetto.dev and chrome://tracing open.

    Every rank is a process; its computes, messages and reductions are threads of it. Names are those of the
    instructions (`2F0`), categories their kinds (`F`).
    """
    events = [*_headings(timeline.ranks), *(_trace_event(event) for event in timeline.events)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _headings(ranks: Iterable[int]) -> Iterator[TraceEvent]:
    for rank in ranks:
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for lane, name in enumerate(LANES):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}


def _trace_event(event: Event) -> TraceEvent:
    category, lane = _category(event.instruction)
    return {
        "ph": "X",
        "name": str(event.instruction),
        "cat": category,
        "pid": event.rank,
        "tid": LANES.index(lane),
        "ts": event.start * MICROSECONDS,
        "dur": (event.end - event.start) * MICROSECONDS,
    }


def _category(instruction: Instruction) -> tuple[str, str]:
    """Return the category of an instruction and the lane that it is drawn on."""
    match instruction:
        case Compute(_, kind, _):
            return kind, "compute"
        case Load():
            return "load", "compute"
        case Send():
            return "send", "send"
        case Recv():
            return "receive", "receive"
        case Reduce():
            return "reduce", "reduce"
        case Step():
            return "step", "compute"
        case Free():
            return "free", "compute"


def draw(timeline: Timeline, *, unit: float = 1.0) -> str:
    """Return the computes of a timeline as text: a line per rank, a column per unit of time.

    A column shows what its rank computes at the middle of it: `F0` where it begins, `==` where it goes on, a dot where
    the rank is idle; computes between two middles are not seen. Stages are named (`2F0`) if some rank computes several.

    Args:
        timeline: simulated or recorded times.
        unit: seconds per column.
    """
    lines = {rank: timeline.computes(rank) for rank in timeline.ranks}
    starts = [events[0].start for events in lines.values() if events]
    if not starts:
        return ""
    many = any(len({_compute(event).stage for event in events}) > 1 for events in lines.values())
    cells = {rank: _cells(events, min(starts), unit, many) for rank, events in lines.items()}
    width = max((len(cell) for line in cells.values() for cell in line), default=1)
    return "\n".join(f"{rank} | " + " ".join(f"{cell:>{width}}" for cell in line) for rank, line in cells.items())


def _cells(events: tuple[Event, ...], origin: float, unit: float, many: bool) -> list[str]:
    cells: list[str] = []
    for event in events:
        first, last = (ceil((time - origin) / unit - MIDDLE) for time in (event.start, event.end))
        if first == last:
            continue  # too short to be seen
        name = str(event.instruction) if many else str(event.instruction)[len(str(_compute(event).stage)) :]
        cells.extend("." * (first - len(cells)))
        cells.extend([name, *["=" * len(name)] * (last - first - 1)])
    return cells


def _compute(event: Event) -> Compute:
    assert isinstance(event.instruction, Compute), "only computes are drawn"
    return event.instruction
