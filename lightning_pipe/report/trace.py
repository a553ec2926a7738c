"""Traces of a timeline for Perfetto or Chrome, and drawings in plain text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias

from typing_extensions import assert_never

from lightning_pipe.core.effects import OwnWork, effects_of
from lightning_pipe.core.milestones import Milestone
from lightning_pipe.core.program import (
    AnyCompute,
    Instruction,
    Recv,
    Reduce,
    Send,
    Step,
    Traffic,
)
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.report.account import Flight, flights, step_interval

TraceEvent: TypeAlias = dict[str, str | int | float | dict[str, str] | dict[str, int] | dict[str, int | float]]
Curve: TypeAlias = Sequence[tuple[float, int]]  # seconds at which an amount changes, bytes from then on
Curves: TypeAlias = Mapping[int, Curve]  # by rank
Notes: TypeAlias = Mapping[tuple[int, AnyCompute], str]  # by rank and compute, what is written behind its name

NO_CURVES: Curves = {}
MICROSECONDS = 1e6  # the trace format counts in microseconds
INSIDE_US = 0.01  # by so much an arrow begins and ends before the end of its bars
MIDDLE = 0.5  # of a column of a drawing
# Overlapping kinds of one rank lie on lanes of their own.
LANES = ("compute", "send", "receive", "reduce", "out", "back")
MOST_ABREAST = 1000  # threads per lane: what overlaps within a lane lies side by side
PREDICTED_PID = 1_000_000  # process of rank 0 as predicted; as measured, a rank is the process of its number


def chrome_trace(
    timeline: Timeline,
    *,
    memory: Curves = NO_CURVES,
    predicted: Timeline | None = None,
    predicted_memory: Curves = NO_CURVES,
    messages: Sequence[Flight] | None = None,
    traffic: Traffic | None = None,
) -> str:
    """Return a timeline as JSON that https://ui.perfetto.dev and chrome://tracing open.

    Every rank is a process; its computes, messages and reductions are threads of it, and its memory a counter. Names
    are those of the instructions (`2F0`), categories their kinds (`F`). An arrow leads from the compute that made a
    message to its receipt; arguments of an event are its peer, its bytes and its predicted seconds, as far as they are
    known; the begin of each optimizer step is marked.

    Args:
        timeline: simulated or recorded times.
        memory: bytes over time, by rank, on the clock of the timeline.
        predicted: a simulated timeline to lay beside a recorded one: each rank is shown twice, and both begin together.
        predicted_memory: bytes over time, by rank, on the clock of `predicted`.
        messages: those of the timeline; found in it if it is of one step, to be given if it is of several.
        traffic: what messages carry, for their bytes.
    """
    arrows = flights(timeline) if messages is None else messages
    if predicted is None:
        events = [*_run_events(timeline, memory, _Facts(traffic, {}), suffix=""), *_arrows(arrows)]
    else:
        shift = step_interval(timeline)[0] - step_interval(predicted)[0]
        seconds = {(event.rank, event.instruction): event.end - event.start for event in predicted.events}
        plain, facts = _Facts(traffic, {}), _Facts(traffic, seconds)
        before = _run_events(predicted, predicted_memory, plain, suffix=" predicted", pid=PREDICTED_PID, shift=shift)
        events = [*before, *_run_events(timeline, memory, facts, suffix=" measured")]
        events += [*_arrows(flights(predicted), pid=PREDICTED_PID, shift=shift), *_arrows(arrows)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


@dataclass(frozen=True)
class _Facts:
    """What is known of the instructions of a run besides their times: traffic, and predicted seconds by rank."""

    traffic: Traffic | None
    seconds: Mapping[tuple[int, Instruction], float]

    def of(self, event: Event) -> dict[str, int | float]:
        """Return the arguments of an event."""
        found: dict[str, int | float] = {}
        if isinstance(event.instruction, (Send, Recv)):
            found["peer"] = event.instruction.peer
            if self.traffic is not None:
                found["bytes"] = self.traffic.bytes_of(event.instruction.message)
        elif isinstance(event.instruction, Reduce) and self.traffic is not None:
            found["bytes"] = self.traffic.buckets[event.instruction.bucket].bytes
        if (seconds := self.seconds.get((event.rank, event.instruction))) is not None:
            found["predicted seconds"] = seconds
        return found


def _arrows(messages: Iterable[Flight], *, pid: int = 0, shift: float = 0.0) -> Iterator[TraceEvent]:
    """Yield an arrow for each message: from its sender's lane of computes to its receiver's of receipts."""
    for number, flight in enumerate(messages):
        arrow: TraceEvent = {"name": "message", "cat": "message", "id": f"{pid}:{number}"}
        begin, end = (flight.start + shift) * MICROSECONDS, (flight.end + shift) * MICROSECONDS
        inside = begin - INSIDE_US  # at its very end nothing encloses the arrow's begin
        yield {**arrow, "ph": "s", "pid": pid + flight.sender, "tid": 0, "ts": inside}
        tid = LANES.index("receive") * MOST_ABREAST
        yield {**arrow, "ph": "f", "bp": "e", "pid": pid + flight.receiver, "tid": tid, "ts": end - INSIDE_US}


def _run_events(
    timeline: Timeline, memory: Curves, facts: _Facts, *, suffix: str, pid: int = 0, shift: float = 0.0
) -> Iterator[TraceEvent]:
    """Yield the events of one run; the process of rank r is `pid` + r, and `shift` seconds are added to its times."""
    for rank in timeline.ranks:
        own = {"pid": pid + rank}
        yield {"ph": "M", "name": "process_name", **own, "args": {"name": f"rank {rank}{suffix}"}}
        yield {"ph": "M", "name": "process_sort_index", **own, "args": {"sort_index": 2 * rank + (pid == 0)}}
        events = [event for event in timeline.events if event.rank == rank]
        yield from (own | found for found in _rank_events(events, facts, shift))
        for time, count in memory.get(rank, ()):
            yield {"ph": "C", "name": "memory", **own, "ts": (time + shift) * MICROSECONDS, "args": {"bytes": count}}


def _rank_events(events: Sequence[Event], facts: _Facts, shift: float) -> Iterator[TraceEvent]:
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
                    "args": facts.of(event),
                }
                if isinstance(event.instruction, Step):
                    at = (event.start + shift) * MICROSECONDS
                    yield {"ph": "i", "s": "p", "name": "optimizer step", "tid": tid, "ts": at}


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
        case AnyCompute():
            return instruction.kind, "compute"
        case Send():
            return "send", "send"
        case Recv():
            return "receive", "receive"
        case Reduce():
            return "reduce", "reduce"
        case Step():
            return "step", "compute"
        case OwnWork():
            return instruction.code.lower(), effects_of(instruction).resource or "compute"
        case Milestone():
            return instruction.code.lower(), "compute"
        case _:
            assert_never(instruction)


def draw(timeline: Timeline, *, unit: float = 1.0, notes: Notes | None = None) -> str:
    """Return the computes of a timeline as text: a line per rank, a column per unit of time.

    A column shows what its rank computes at the middle of it: `F0` where it begins, `==` where it goes on, a dot where
    the rank is idle; computes between two middles are not seen. Stages are named (`2F0`) if some rank computes several.

    Args:
        timeline: simulated or recorded times.
        unit: seconds per column.
        notes: what is written behind computes, such as the version of the weights that they read.
    """
    lines = {rank: timeline.computes(rank) for rank in timeline.ranks}
    starts = [events[0].start for events in lines.values() if events]
    if not starts:
        return ""
    many = any(len({_compute(event).stage for event in events}) > 1 for events in lines.values())
    cells = {rank: _cells(events, min(starts), unit, many, notes or {}) for rank, events in lines.items()}
    width = max((len(cell) for line in cells.values() for cell in line), default=1)
    return "\n".join(f"{rank} | " + " ".join(f"{cell:>{width}}" for cell in line) for rank, line in cells.items())


def _cells(events: tuple[Event, ...], origin: float, unit: float, many: bool, notes: Notes) -> list[str]:
    cells: list[str] = []
    for event in events:
        first, last = (ceil((time - origin) / unit - MIDDLE) for time in (event.start, event.end))
        if first == last:
            continue  # too short to be seen
        name = str(event.instruction) if many else str(event.instruction)[len(str(_compute(event).stage)) :]
        name += f"/{note}" if (note := notes.get((event.rank, _compute(event)))) else ""
        cells.extend("." * (first - len(cells)))
        cells.extend([name, *["=" * len(name)] * (last - first - 1)])
    return cells


def _compute(event: Event) -> AnyCompute:
    assert isinstance(event.instruction, AnyCompute), "only computes are drawn"
    return event.instruction
