"""Show a plan, its prediction and its measurement on one HTML page that needs no server and no network.

Every figure on the page is written here, with the functions that write the tables and pictures, so all agree; the
script of the page (`page.html`, `page.js`, `page.css`) draws and zooms, and computes nothing but positions. A page is
kept below `MOST_EVENTS` events: of a large cluster the first ranks are drawn, which the page says.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import Any

from rich.table import Table

from lightning_pipe.core.effects import OWN_WORK, OwnWork, effects_of
from lightning_pipe.core.program import AnyCompute, Instruction, Reduce, Step
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.report.account import flights, mean_bubble, mean_computing, run_facts, step_interval, step_seconds
from lightning_pipe.report.comparison import Comparison
from lightning_pipe.report.comparison_table import verdict
from lightning_pipe.report.explain import time_sentences
from lightning_pipe.report.plot import COLOURS, MEANINGS, MESSAGE, REDUCE, STEP
from lightning_pipe.report.table import html_of
from lightning_pipe.report.trace import Curve
from lightning_pipe.units import format_bytes, format_seconds, format_share

MOST_EVENTS = 12_000  # drawn of predicted and measured together, some 100 bytes each
STACK = ("parameters", "gradients", "optimizer", "buffers", "saved", "messages", "workspace")
_CAP_IN_SIGHT = 2.0  # a limit is drawn if it is at most so many times the peak, else written
_DIGITS = 9  # of seconds on the page: nanoseconds


@dataclass(frozen=True)
class Stack:
    """Memory of the ranks that use the same, by what it is for.

    Attributes:
        ranks: the ranks, for people.
        times: seconds of the predicted step at which an amount changes.
        kinds: bytes from each of these times on, by the names of `STACK`.
        limit: bytes that a rank may use; None if nothing limits it.
        measured_saved: measured bytes kept for the backward over time, on a clock of its own; () if not measured.
        measured_peak: most bytes of everything; None if not measured.
    """

    ranks: str
    times: tuple[float, ...]
    kinds: Mapping[str, tuple[int, ...]]
    limit: int | None
    measured_saved: Curve = ()
    measured_peak: int | None = None

    @property
    def peak(self) -> int:
        """Return the most bytes predicted at once."""
        return max((sum(amounts) for amounts in zip(*self.kinds.values(), strict=True)), default=0)


@dataclass(frozen=True)
class JudgedPlan:
    """Another plan that was judged: the step of the slider that it stands for, and what is predicted of it."""

    layout: str
    schedule: str
    microbatches: int
    step_s: float
    bubble: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Page:
    """What stands on a page.

    Attributes:
        title: what was planned or run.
        identity: names and values that tell two pages apart.
        costs: where the prediction comes from, in a sentence.
        samples: samples per step.
        rates: further rates by name, of a step of so many seconds, where they are known.
        tables: headings and tables: the plan first, alternatives.
        sentences: what speaks for and against the plan.
        predicted: the simulated step.
        memory: predicted memory, and measured where it was.
        candidates: plans to try; the plan itself first.
        plan: the plan as a file.
        measured: the recorded step to draw; None where nothing ran.
        comparison: figures of predicted and measured steps; None where there is nothing to compare.
        ranks: for every rank that is drawn, its name; by default its number.
    """

    title: str
    identity: tuple[tuple[str, str], ...]
    costs: str
    samples: int
    rates: Callable[[float], Mapping[str, str]]
    tables: tuple[tuple[str, Table], ...]
    sentences: tuple[str, ...]
    predicted: Timeline | None
    memory: tuple[Stack, ...]
    candidates: tuple[JudgedPlan, ...]
    plan: str
    measured: Timeline | None = None
    comparison: Comparison | None = None
    ranks: Mapping[int, str] | None = None


def html_page(page: Page) -> str:
    """Return the page as one HTML text, with its style, script and data inside."""
    data = json.dumps(_data(page), separators=(",", ":")).replace("</", "<\\/")
    source = files("lightning_pipe.report")
    text = source.joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": escape(page.title),
        "STYLE": source.joinpath("page.css").read_text(encoding="utf-8"),
        "SCRIPT": source.joinpath("page.js").read_text(encoding="utf-8"),
        "DATA": data,
        "BODY": _body(page),
    }
    return re.sub("@(TITLE|STYLE|SCRIPT|DATA|BODY)@", lambda found: parts[found[1]], text)  # in one pass: data stays


def _body(page: Page) -> str:
    """Return what needs no script: identity, cards, sentences, tables."""
    about = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in page.identity)
    cards = "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span><i>{escape(note)}</i></div>'
        for name, value, note in _cards(page)
    )
    measured = [] if page.comparison is None else verdict(page.comparison)
    if page.measured is not None:
        measured = [*time_sentences(page.measured, "Measured"), *measured]
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in (*measured, *page.sentences))
    all_tables = [*page.tables[:1], ("Utilization by rank", _utilization(page)), *page.tables[1:]]
    tables = "".join(f"<h2>{escape(name)}</h2>{html_of(table)}" for name, table in all_tables)
    plan = f"<details><summary>The plan as a file</summary><pre>{escape(page.plan)}</pre></details>"
    return (
        f'<section><dl>{about}</dl></section><section class="cards">{cards}</section>'
        f"<section><h2>Summary</h2><ul>{sentences}</ul><p class='note'>{escape(page.costs)}</p></section>"
        f"<section id='pictures'></section><section>{tables}{plan}</section>"
    )


def _cards(page: Page) -> Iterable[tuple[str, str, str]]:
    """Yield name, value and note of the figures at the top; each says which of them are measured."""
    runs = [
        (word, run) for word, run in (("measured", page.measured), ("predicted", page.predicted)) if run is not None
    ]
    if (comparison := page.comparison) is not None:
        step, bubble = comparison.step, comparison.bubble
        steps = [("measured", step.measured), ("predicted", step.predicted)]
        bubbles = [("measured", bubble.measured), ("predicted", bubble.predicted)]
    else:
        shown = runs[-1:] if page.predicted is not None else runs[:1]
        steps = [(word, step_seconds(run)) for word, run in shown]
        bubbles = [(word, mean_bubble(run)) for word, run in shown]
    yield from _card("step", steps, format_seconds)
    yield from _card("bubble", bubbles, format_share)
    yield from _card("samples per second", steps, lambda step_s: f"{page.samples / (step_s or math.inf):.4g}")
    for name in page.rates(1.0):
        yield from _card(name, steps, lambda step_s, name=name: page.rates(step_s)[name])  # type: ignore[misc]
    yield from _card("ranks compute, of the step", [(word, mean_computing(run)) for word, run in runs], format_share)
    if page.memory:
        fullest = max(page.memory, key=lambda stack: stack.peak)
        limit = f"of {format_bytes(fullest.limit)}" if fullest.limit is not None else "no limit is known"
        yield "peak memory, predicted", format_bytes(fullest.peak), f"rank {fullest.ranks}, {limit}"


def _card(
    name: str, figures: Sequence[tuple[str, float]], write: Callable[[float], str]
) -> Iterator[tuple[str, str, str]]:
    """Yield one card: the first figure, the others in its note."""
    if figures:
        (word, value), *others = figures
        yield f"{name}, {word}", write(value), ", ".join(f"{other} {write(figure)}" for other, figure in others)


def _utilization(page: Page) -> Table:
    """Return which share of the step every rank computes, and its bubble, measured and predicted."""
    runs = [
        (word, run) for word, run in (("measured", page.measured), ("predicted", page.predicted)) if run is not None
    ]
    table = Table("rank")
    for heading in (f"{share}, {word}" for share in ("computing", "bubble") for word, _ in runs):
        table.add_column(heading, justify="right")
    for rank in sorted({rank for _, run in runs for rank in run.ranks}):
        computing = (format_share(run.busy(rank) / (step_seconds(run) or math.inf)) for _, run in runs)
        table.add_row(
            (page.ranks or {}).get(rank, str(rank)), *computing, *(format_share(r.bubble(rank)) for _, r in runs)
        )
    return table


def _data(page: Page) -> dict[str, Any]:
    runs = [("measured", page.measured), ("predicted", page.predicted)]
    ranks = _drawn_ranks([run for _, run in runs if run is not None])
    everyone = sorted({rank for _, run in runs if run is not None for rank in run.ranks})
    names = page.ranks or {}
    drawn = {code: kind.effects for code, kind in OWN_WORK.items() if kind.effects.label}
    return {
        "runs": [_run(name, run, ranks) for name, run in runs if run is not None],
        "ranks": [names.get(rank, str(rank)) for rank in ranks],
        "left_out": len(everyone) - len(ranks),
        "colours": {
            **COLOURS,
            "sum": REDUCE,
            "step": STEP,
            **{code.lower(): effects.colour for code, effects in drawn.items()},
            "message": MESSAGE,
        },
        "meanings": MEANINGS,
        "own_work": {code.lower(): effects.label for code, effects in drawn.items()},
        "thin": ["sum", *(code.lower() for code, effects in drawn.items() if effects.resource in ("out", "back"))],
        "memory": [_stack(stack) for stack in page.memory],
        "kinds": STACK,
        "candidates": [{**asdict(one), **_written(one, page.candidates[0])} for one in page.candidates],
    }


def _written(candidate: JudgedPlan, plan: JudgedPlan) -> dict[str, str]:
    """Return the figures of a candidate as they are written everywhere."""
    return {
        "step": format_seconds(candidate.step_s),
        "ratio": f"{candidate.step_s / plan.step_s:.2f}",
        "idle": format_share(candidate.bubble),
        "peak": format_bytes(candidate.peak_bytes),
    }


def _drawn_ranks(runs: Sequence[Timeline]) -> list[int]:
    """Return the ranks that are drawn: the first, as many as a page can hold."""
    counts: dict[int, int] = {}
    for run in runs:
        for event in run.events:
            counts[event.rank] = counts.get(event.rank, 0) + 1
    drawn: list[int] = []
    total = 0
    for rank in sorted(counts):
        total += counts[rank]
        if drawn and total > MOST_EVENTS:
            break
        drawn.append(rank)
    return drawn


def _run(name: str, run: Timeline, ranks: Sequence[int]) -> dict[str, Any]:
    start, end = step_interval(run)
    places = {rank: place for place, rank in enumerate(ranks)}
    bars = [
        [places[event.rank], row, round(event.start - start, _DIGITS), round(event.end - event.start, _DIGITS), text]
        for event in run.events
        if event.rank in places and (row := _row(event.instruction)) and event.end > event.start
        for text in [_text(event)]
    ]
    messages = [
        [
            places[flight.receiver],
            places.get(flight.sender, -1),
            round(flight.start - start, _DIGITS),
            round(flight.end - flight.start, _DIGITS),
            f"{flight.message} from rank {flight.sender}",
        ]
        for flight in flights(run)
        if flight.receiver in places
    ]
    return {
        "name": name,
        "seconds": end - start,
        "heading": f"{name}: {run_facts(run)}",
        "bars": bars,
        "messages": messages,
    }


def _row(instruction: Instruction) -> str:
    """Return how an instruction is drawn; "" for what is drawn as a message, or not at all."""
    if isinstance(instruction, AnyCompute):
        return instruction.kind
    if isinstance(instruction, OwnWork):
        return instruction.code.lower() if effects_of(instruction).label else ""
    kinds: tuple[tuple[type, str], ...] = ((Reduce, "sum"), (Step, "step"))
    return next((row for kind, row in kinds if isinstance(instruction, kind)), "")


def _text(event: Event) -> str:
    """Return what is written into a bar, then what is shown beside the pointer."""
    instruction = event.instruction
    if not isinstance(instruction, AnyCompute):
        return f"|{instruction}"
    return f"{'+'.join(map(str, instruction.microbatches))}|{instruction}"


def _stack(stack: Stack) -> dict[str, Any]:
    limit = stack.limit
    drawn = limit is not None and limit <= _CAP_IN_SIGHT * max(stack.peak, stack.measured_peak or 0)
    peaks = [f"predicted peak {format_bytes(stack.peak)}"]
    if stack.measured_peak is not None:
        peaks.append(f"measured peak {format_bytes(stack.measured_peak)}")
    if limit is not None:
        peaks.append(f"limit {format_bytes(limit)}")
    return {
        "ranks": stack.ranks,
        "heading": ", ".join(peaks),
        "times": [round(time, _DIGITS) for time in stack.times],
        "kinds": [list(stack.kinds[kind]) for kind in STACK],
        "limit": limit if drawn else None,
        "measured": [[round(time, _DIGITS), amount] for time, amount in stack.measured_saved],
        "measured_peak": stack.measured_peak,
    }


def thinned(
    times: Sequence[float], series: Sequence[Sequence[int]], *, most: int = 1500
) -> tuple[list[float], list[list[int]]]:
    """Return curves with at most so many points; of points that are left out the one with the largest sum stays."""
    if len(times) <= most:
        return list(times), [list(one) for one in series]
    size = -(-len(times) // most)
    chunks = [list(chunk) for _, chunk in groupby(range(len(times)), key=lambda k: k // size)]
    picked = [max(chunk, key=lambda k: sum(one[k] for one in series)) for chunk in chunks]
    return [times[k] for k in picked], [[one[k] for k in picked] for one in series]
