"""Tables of a plan and of where the time goes, in plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from html import escape
from io import StringIO
from itertools import pairwise

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_pipe.core.graph import Graph, Node
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.program import AnyCompute
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.errors import PlanError
from lightning_pipe.units import counted_noun, format_bytes, format_seconds, format_share, numbers_text

WIDTH = 100  # characters; long names are cut to fit
WIDE = 140  # of tables with many columns
_LONG = 8  # numbers of a list of which only the ends are written
_NOTHING = 0.001  # of the cost of a graph


def plan_table(
    plan: Plan,
    graph: Graph,
    *,
    seconds: Sequence[float] | None = None,
    joinable: Collection[int] | None = None,
    width: int = WIDTH,
) -> str:
    """Return the stages of a plan as text; arguments and errors are those of `plan_grid`, `width` in characters."""
    return text_of(plan_grid(plan, graph, seconds=seconds, joinable=joinable), width)


def plan_grid(
    plan: Plan, graph: Graph, *, seconds: Sequence[float] | None = None, joinable: Collection[int] | None = None
) -> Table:
    """Return the stages of a plan as a table, to be printed or written as HTML.

    Args:
        plan: the plan.
        graph: the graph that it cuts.
        seconds: seconds of every node of the graph, forward and backward; without them shares of cost are those of
            floating point operations, or of bytes touched where none were counted.
        joinable: stages whose W of several micro-batches can be one product, if the plan wants that; None if not.

    Raises:
        PlanError: if a stage begins at a node that the graph does not have, or before the stage in front of it.
    """
    cuts = _cuts(plan, graph)
    costs = _costs(graph) if seconds is None else list(seconds)
    table = Table(box=box.SIMPLE, title=_headline(plan, graph), title_justify="left")
    for heading in ("stage", "ranks", "modules"):
        table.add_column(heading, overflow="ellipsis" if heading != "modules" else "fold", no_wrap=heading != "modules")
    for heading in ("parameters", "cost", "samples\nper replica"):
        table.add_column(heading, justify="right", no_wrap=True)
    drops = any(stage.recompute or stage.offload for stage in plan.stages)
    if drops:
        table.add_column("not kept", no_wrap=True)
    if joinable is not None:
        table.add_column("W", no_wrap=True)
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        nodes = graph.nodes[start:stop]
        table.add_row(
            str(stage),
            numbers_text(plan.stages[stage].ranks),
            _modules(nodes),
            format_bytes(_parameter_bytes(nodes, graph)),
            format_share(sum(costs[start:stop]) / (sum(costs) or 1.0)),
            _samples(plan, stage, graph.samples),
            *([_not_kept(plan.stages[stage])] if drops else []),
            *(["joined" if stage in joinable else "one by one"] if joinable is not None else []),
        )
    return table


def head_sentence(graph: Graph, samples: int) -> str:
    """Return which line of a step needs all samples of a batch, and what is put together for it; "" if none does."""
    head = graph.head
    if head is None:
        return ""
    where = " at ".join(filter(None, (head.op, head.line)))
    what = "Gradients" if head.holds_backwards else "Results"
    size = format_bytes(head.size(samples))
    return f"{what} need all samples of a batch at once ({where}): the last stage puts {size} together."


def idle_stages(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """Return the stages that hold no parameters and have next to nothing to compute.

    Args:
        plan: the plan.
        graph: the graph that it cuts.
    """
    costs, cuts = _costs(graph), _cuts(plan, graph)
    return tuple(
        stage
        for stage, (start, stop) in enumerate(pairwise(cuts))
        if not any(node.parameters for node in graph.nodes[start:stop])
        and sum(costs[start:stop]) <= _NOTHING * sum(costs)
    )


def _headline(plan: Plan, graph: Graph) -> str:
    options = "".join(f", {name} {_shortened(str(value))}" for name, value in plan.options.items())
    ranks = len(plan.stages[0].ranks)
    if len(plan.stages) == 1:
        kind = f"data parallel on {ranks} ranks" if ranks > 1 else "one device"
    else:
        kind = f"{plan.schedule}{options}"
    batch = f"{graph.samples} samples in {counted_noun(plan.microbatches, 'micro-batch')}"
    return "\n".join(filter(None, (f"{kind}: {batch}", head_sentence(graph, graph.samples))))


def _shortened(numbers: str) -> str:
    """Return a long list of numbers by its ends."""
    parts = numbers.split(",")
    return ",".join([*parts[:2], "…", *parts[-2:]]) if len(parts) > _LONG else numbers


def _cuts(plan: Plan, graph: Graph) -> list[int]:
    """Return where the stages begin, and the end of the graph."""
    cuts: list[int] = []
    for number, stage in enumerate(plan.stages):
        position = graph.position(stage.at)
        if position < 0:
            raise PlanError(f"stage {number} begins at {stage.at!r}; the graph has no such node or module")
        if position <= (cuts[-1] if cuts else -1):
            raise PlanError(
                f"stage {number} begins at {stage.at!r}, which is not behind the start of stage {number - 1}"
            )
        cuts.append(position)
    return [*cuts, len(graph.nodes)]


def _costs(graph: Graph) -> list[float]:
    operations = [float(node.flops + node.backward_flops) for node in graph.nodes]
    return operations if any(operations) else [float(node.touched_bytes) for node in graph.nodes]


def _modules(nodes: Sequence[Node]) -> str:
    """Return the first and the last module of a stage."""
    modules = [node.module for node in nodes if node.module]
    return " … ".join(dict.fromkeys((modules[0], modules[-1]))) if modules else "-"


def _parameter_bytes(nodes: Iterable[Node], graph: Graph) -> int:
    return sum(graph.parameter_bytes[name] for name in {name for node in nodes for name in node.parameters})


def _samples(plan: Plan, stage: int, samples: int) -> str:
    """Return the samples of each replica in the largest micro-batch."""
    size = -(-samples // plan.microbatches)
    if plan.stages[stage].share == "microbatches":
        return f"{size} (round-robin)"
    layout, replicas = plan.layout, range(len(plan.stages[stage].ranks))
    sizes = [len(layout.samples(stage, replica, 0, size)) for replica in replicas]
    if len(sizes) > 2 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    return " + ".join(map(str, sizes))


def _not_kept(stage: StagePlan) -> str:
    """Return in words at how many places a stage recomputes or offloads what is saved."""
    counts = {"recompute": len(stage.recompute), "offload": len(stage.offload)}
    return ", ".join(f"{word} {count}" for word, count in counts.items() if count) or "-"


def timeline_table(timeline: Timeline, *, width: int = WIDTH) -> str:
    """Return where each rank spends its time as a table.

    `waiting` is the time within a rank's own span in which it computes nothing, `bubble` its share of the span, and
    `idle with flush` counts from the first start to the last end of all ranks.
    """
    kinds = [kind for kind in ("F", "I", "W", "B") if any(_seconds(timeline, rank, kind) for rank in timeline.ranks)]
    table = Table(box=box.SIMPLE, title=f"makespan {format_seconds(timeline.makespan)}", title_justify="left")
    for heading in ("rank", *kinds, "waiting", "bubble", "idle with flush"):
        table.add_column(heading, justify="right")
    for rank in timeline.ranks:
        table.add_row(
            str(rank),
            *(format_seconds(_seconds(timeline, rank, kind)) for kind in kinds),
            format_seconds(max(0.0, timeline.span(rank) - timeline.busy(rank))),
            format_share(timeline.bubble(rank)),
            format_seconds(timeline.idle_with_flush(rank)),
        )
    return text_of(table, width)


def _seconds(timeline: Timeline, rank: int, kind: str) -> float:
    computes = ((event, event.instruction) for event in timeline.computes(rank))
    return sum(e.end - e.start for e, compute in computes if isinstance(compute, AnyCompute) and compute.kind == kind)


def text_of(table: Table, width: int) -> str:
    """Return a table as plain text."""
    out = StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def wrapped(sentence: str, width: int) -> str:
    """Return a sentence in lines of at most so many characters; words, paths among them, stay whole."""
    return textwrap.fill(sentence, width, break_long_words=False, break_on_hyphens=False)


def html_of(table: Table) -> str:
    """Return a table as HTML, its title as a caption; cells may have several lines."""
    kinds = ["" if column.justify == "right" else " class='text'" for column in table.columns]
    headings = (f"<th{kind}>{escape(str(c.header))}</th>" for kind, c in zip(kinds, table.columns, strict=True))
    rows = zip(*(column.cells for column in table.columns), strict=True)
    lines = ("".join(f"<td{k}>{escape(str(cell))}</td>" for k, cell in zip(kinds, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    caption = f"<caption>{escape(str(table.title))}</caption>" if table.title else ""
    head = f"<thead><tr>{''.join(headings)}</tr></thead>"
    return f"<div class='table'><table>{caption}{head}<tbody>{body}</tbody></table></div>"
