"""Generator of the table of all schedules in docs/schedules.md, and of the text of a page for each schedule.

    python -m benchmarks.schedule_docs

It replaces everything below the marker of docs/schedules.md. Figures come from the simulation that `lightning-pipe
schedules` shows, texts from the docstrings of the schedules and from `WHEN`. `benchmarks.site` writes the pages.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from lightning_pipe.cli.schedules import SchedulesOptions, Shown, shown
from lightning_pipe.schedule import SCHEDULES

PAGE = Path(__file__).parent.parent / "docs" / "schedules.md"
MARKER = "<!-- What follows is written by `python -m benchmarks.schedule_docs`. -->\n"
CASE = SchedulesOptions()
QUICK, SLOW = 0.25, 1.0  # messages, in forwards
LONGER = 4  # times as many micro-batches
CASES = {
    f"{CASE.microbatches} micro-batches": CASE,
    "fused": replace(CASE, fused=True),
    f"messages {QUICK:g}": replace(CASE, message=QUICK),
    f"messages {SLOW:g}": replace(CASE, message=SLOW),
    f"{LONGER * CASE.microbatches} micro-batches, fused, messages {QUICK:g}": replace(
        CASE, microbatches=LONGER * CASE.microbatches, message=QUICK, fused=True
    ),
}

WHEN = {
    "gpipe": "All forwards have to come first; or links are slow, and there is memory for all micro-batches.",
    "1f1b": "Little memory, one stage per device, any number of micro-batches: the simple choice. Slow links ask for "
    "`warmup=pb`.",
    "interleaved": "Fast links and some room for activations: idle time shrinks with the stages per device.",
    "breadth_first": "Memory for all micro-batches, and links that send a message in less time than a stage computes; "
    "or parameters that are gathered for each stage.",
    "zb_h1": "In the memory of 1F1B's first device, with free messages, half of its idle time. No more messages.",
    "zb_h2": "Links are slow. With free messages it takes as long as `zb_h1` and keeps nearly twice as much.",
    "2bp": "Micro-batches so small that W of several at once (`join`) is quicker than one by one, and memory for the "
    "inputs of all W. Without `join` it takes no less time than 1F1B, which sends its gradients early anyway.",
    "zb_v": "F, I and W take about equally long, and links are fast: hardly idle, in the memory of 1F1B. The first and "
    "the last stage are on one device, and so are embeddings that they share.",
    "zb_v_greedy": "As `zb_v` where F, I and W take different times.",
    "v_half": "1F1B does not fit into memory, and links are fast.",
    "v_min": "Nothing else fits into memory.",
    "chimera": "Few micro-batches, small parameters, large activations.",
    "hanayo": "As Chimera without room for a second copy of the parameters. Links have to be fast.",
    "bitpipe": "As Chimera with half the idle time and twice the messages, so for fast links.",
    "dualpipe": "Two micro-batches per device or more, and room for a second copy of the parameters: short idle time, "
    "and messages cost little.",
    "dualpipe_v": "As DualPipe with one copy of the parameters, and with more messages.",
    "pe": "Plans after SPP, which counts on this order: links are as busy as devices.",
    "greedy": "Times of stages differ, or memory is tight: it tries the published orders too, and takes the best.",
    "milp": "Small problems, and time to search: tens of computes per device.",
}


def own_schedules() -> list[str]:
    """List the schedules of the package, without those that somebody registered."""
    return [
        name for name, schedule in SCHEDULES.items() if str(schedule.order.__module__).startswith("lightning_pipe.")
    ]


def page(text: str) -> str:
    """Return the page with all that stands below its marker rebuilt."""
    prose, marker, _ = text.partition(MARKER)
    if not marker:
        raise ValueError(f"{PAGE} has no line {MARKER.strip()!r}, below which its tables and drawings are written")
    return prose + MARKER + "\n" + "\n".join(_below())


def _below() -> Iterator[str]:
    cases = {name: [shown(name, case) for case in CASES.values()] for name in own_schedules()}
    yield f"## All schedules on {CASE.devices} devices\n"
    yield (
        f"Average idle time of a device with {CASE.microbatches} micro-batches, from the first start to the last end. "
        "F, I and W of a device's share take one unit of time each, and messages are free. Each further column changes "
        "what its title says. *Fused*: the backward is one piece, and sends its gradient at its end. *Messages*: their "
        f"time, in forwards. *Kept*: the most micro-batches of its share that a device keeps at once, of "
        f"{CASE.microbatches}. Every page has the source, a drawing and the memory of each device.\n"
    )
    yield from _table(("schedule", *CASES, "kept", "parameters"), (_row(name, runs) for name, runs in cases.items()))


def _row(name: str, runs: Sequence[Shown]) -> list[str]:
    first = runs[0]
    return [
        f"[{name}](schedule/{name}.md)",
        *(f"{one.idle:.4g}" for one in runs),
        f"{max(first.shares):g}",
        f"{first.copies:g}x",
    ]


def _table(headings: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    for cells in (headings, ["---", *["---:"] * (len(headings) - 1)], *rows):
        yield f"| {' | '.join(cells)} |"
    yield ""


def section(name: str, example: Shown) -> Iterator[str]:
    """Yield the paragraphs of a schedule's page: source, use, figures and drawing of an example on `CASE`."""
    yield from _source(name)
    if name in WHEN:
        yield f"**When.** {WHEN[name]}"
    stages = len(example.stages(0))
    yield (
        f"**{CASE.devices} devices, {CASE.microbatches} micro-batches**, {stages} stage{'s' * (stages > 1)} per device:"
        f" makespan {example.timeline.makespan:g}{_without_flush(example)}, idle with flush {example.idle:g}, bubble "
        f"{example.bubble:.1%}; devices keep {', '.join(map(str, example.kept))} micro-batches of all their stages, at "
        f"most {max(example.shares):g} of their share; "
        f"{'one copy' if example.copies == 1 else f'{example.copies:g} copies'} of the parameters."
    )
    yield f"```text\n{example.drawing}\n```"


def _without_flush(one: Shown) -> str:
    is_shorter = one.ahead_s < one.timeline.makespan * (1 - 1e-9)
    return (
        f" ({one.ahead_s:g} from step to step [without a flush](../schedules.md#steps-without-a-flush))"
        if is_shorter
        else ""
    )


def _source(name: str) -> tuple[str, ...]:
    """Return what the docstrings say first: of the file what it does and after whom, of the function its order."""
    function = SCHEDULES[name].order
    module = inspect.getmodule(function)
    return (*_prose(inspect.getdoc(module) or "")[:2], *_prose(inspect.getdoc(function) or "")[:1])


def _prose(doc: str) -> list[str]:
    """Return the paragraphs of a docstring before its legend, without what is drawn or listed, one per line."""
    paragraphs = takewhile(lambda text: not text.startswith(("Legend", "Args:")), doc.split("\n\n"))
    return [_sentences(" ".join(text.split())) for text in paragraphs if not text.startswith(" ")]


def _sentences(paragraph: str) -> str:
    """Return a paragraph without the sentence that leads to a list below it."""
    return paragraph if paragraph.endswith((".", "?")) else paragraph[: 1 + paragraph.rfind(". ")]


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
