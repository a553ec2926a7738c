"""How does a timeline look? As a trace for Perfetto or Chrome, and as a drawing in plain text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import TypeAlias

from lightning_pipe.core.program import (
    AnyCompute,
    Compute,
    Evict,
    Fetch,
    Free,
    Instruction,
    Joined,
    Load,
    Recv,
    Reduce,
    Send,
    Step,
)
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.report.account import step_interval

TraceEvent: TypeAlias = dict[str, str | int | float | dict[str, str] | dict[str, int]]
Curve: TypeAlias = Sequence[tuple[float, int]]  # seconds at which an amount changes, bytes from then on
Curves: TypeAlias = Mapping[int, Curve]  # by rank

NO_CURVES: Curves = {}
MICROSECONDS = 1e6  # the trace format counts in microseconds
MIDDLE = 0.5  # of a column of a drawing
# Overlapping kinds of one rank lie on lanes of their own.
LANES = ("compute", "send", "receive", "reduce", "evict", "fetch")
MOST_ABREAST = 1000  # threads per lane: what overlaps within a lane lies side by side
PREDICTED_PID = 1_000_000  # process of rank 0 as predicted; as measured, a rank is the process of its number


def chrome_trace(
    timeline: Timeline,
    *,
    memory: Curves = NO_CURVES,
    predicted: Timeline | None = None,
    predicted_memory: Curves = NO_CURVES,
) -> str:
    """Return a timeline as JSON that https://ui.perfetto.dev and chrome://tracing open.

    Every rank is a process; its computes, messages and reductions are threads of it, and its memory a counter. Names
    are those of the instructions (`2F0`), categories their kinds (`F`).

    Args:
        timeline: simulated or recorded times.
        memory: bytes over time, by rank, on the clock of the timeline.
        predicted: a simulated timeline to lay beside a recorded one: each rank is shown twice, and both begin together.
        predicted_memory: bytes over time, by rank, on the clock of `predicted`.
    """
    if predicted is None:
        events = list(_run_events(timeline, memory, suffix=""))
    else:
        shift = step_interval(timeline)[0] - step_interval(predicted)[0]
        before = _run_events(predicted, predicted_memory, suffix=" predicted", pid=PREDICTED_PID, shift=shift)
        events = [*before, *_run_events(timeline, memory, suffix=" measured")]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _run_events(
    timeline: Timeline, memory: Curves, *, suffix: str, pid: int = 0, shift: float = 0.0
) -> Iterator[TraceEvent]:
    """Yield the events of one run; the process of rank r is `pid` + r, and `shift` seconds are added to its times."""
    for rank in timeline.ranks:
        own = {"pid": pid + rank}
        yield {"ph": "M", "name": "process_name", **own, "args": {"name": f"rank {rank}{suffix}"}}
        yield {"ph": "M", "name": "process_sort_index", **own, "args": {"sort_index": 2 * rank + (pid == 0)}}
        events = [event for event in timeline.events if event.rank == rank]
        yield from (own | found for found in _rank_events(events, shift))
        for time, count in memory.get(rank, ()):
            yield {"ph": "C", "name": "memory", **own, "ts": (time + shift) * MICROSECONDS, "args": {"bytes": count}}


def _rank_events(events: Sequence[Event], shift: float) -> Iterator[TraceEvent]:
    """Yield the threads of a rank and what happens on them."""
    lanes: dict[str, list[Event]] = {lane: [] for lane in LANES}
    for event in events:
        lanes[_category(event.instruction)[1]].append(event)
    for number, (lane, members) in enumerate(lanes.items()):
        for abreast, thread in enumerate(_threads(members)):
            tid = number * MOST_ABREAST + abreast
            name = f"{lane} {abreast + 1}" if abreast else lane
            yield {"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}}
            for event in thread:
                yield {
                    "ph": "X",
                    "name": str(event.instruction),
                    "cat": _category(event.instruction)[0],
                    "tid": tid,
                    "ts": (event.start + shift) * MICROSECONDS,
                    "dur": (event.end - event.start) * MICROSECONDS,
                }


def _threads(events: Sequence[Event]) -> list[list[Event]]:
    """Lay events on as few threads as possible such that none overlap; viewers cut off what does."""
    threads: list[list[Event]] = []
    for event in sorted(events, key=lambda event: event.start):
        free = next((thread for thread in threads if thread[-1].end <= event.start), None)
        if free is None:
            threads.append([event])
        else:
            free.append(event)
    return threads


def _category(instruction: Instruction) -> tuple[str, str]:
    """Return the category of an instruction and the lane that it is drawn on."""
    match instruction:
        case Compute() | Joined():
            return instruction.kind, "compute"
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
        case Evict():
            return "evict", "evict"
        case Fetch():
            return "fetch", "fetch"


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


def _compute(event: Event) -> AnyCompute:
    assert isinstance(event.instruction, AnyCompute), "only computes are drawn"
    return event.instruction
