"""Comparison table: step time as predicted and measured, and a sentence on the largest difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from rich import box
from rich.table import Table

from lightning_pipe.report.comparison import KINDS, Comparison, Figure, MemoryFigures, RankFigures, StageFigures
from lightning_pipe.report.table import WIDTH, text_of
from lightning_pipe.units import format_bytes, format_seconds, format_share, numbers_text

THRESHOLD = 0.25  # share by which a step may differ from its prediction before it is worth a sentence


def comparison_table(
    comparison: Comparison, *, threshold: float = THRESHOLD, width: int = WIDTH, brief: bool = False
) -> str:
    """Return predicted and measured seconds and bytes of every stage and rank as a table, with a verdict below.

    Quantities that are nowhere predicted nor measured have no column. What belongs to a rank (reduction, step, memory)
    stands in the line of its first stage.

    Args:
        comparison: what to show.
        threshold: share by which step time or memory may differ before a sentence says where most of it comes from.
        width: characters per line.
        brief: whether replicas of a stage share a row, with the median of each figure, and ratios are left out.
    """
    columns = list(_columns(comparison))
    steps = "1 step" if comparison.steps == 1 else f"{comparison.steps} steps"
    table = Table(box=box.SIMPLE, title=f"Predicted, and median of {steps} measured", title_justify="left")
    for heading in ("stage", "rank"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for column in columns:
        table.add_column(column.heading, justify="right")
    names = "predicted\nmeasured" if brief else "predicted\nmeasured\nratio"
    seen: set[int] = set()
    for lines in _rows(comparison.stages, folded=brief):
        ranks = [line.rank for line in lines]
        of_rank = seen.isdisjoint(ranks)
        seen.update(ranks)
        cells = [column.cell(lines, brief=brief) if of_rank or not column.of_rank else "" for column in columns]
        table.add_row(str(lines[0].stage), numbers_text(ranks), names, *cells, end_section=not brief)
    return "\n".join([text_of(table, width), "", *_footer(comparison), *verdict(comparison, threshold=threshold)])


def _rows(stages: Sequence[StageFigures], *, folded: bool) -> Iterator[list[StageFigures]]:
    """Yield what shares a row: the replicas of a stage, or each of them."""
    if not folded:
        yield from ([line] for line in stages)
        return
    for _, replicas in groupby(stages, key=lambda line: line.stage):
        yield list(replicas)


@dataclass(frozen=True)
class _Column:
    """A quantity: how to find it for a stage on a rank, and how to write it."""

    heading: str
    figure: Callable[[StageFigures], Figure | None]
    write: Callable[[float], str]
    of_rank: bool

    def cell(self, lines: Sequence[StageFigures], *, brief: bool) -> str:
        figures = [figure for figure in map(self.figure, lines) if figure is not None]
        if not figures:
            return ""
        figure = Figure(median(f.predicted for f in figures), median(f.measured for f in figures))
        cells = (self.write(figure.predicted), self.write(figure.measured), _ratio(figure))
        return "\n".join(cells[:2] if brief else cells)


def _columns(comparison: Comparison) -> Iterator[_Column]:
    """Yield the columns in which something is not zero."""
    for column in _all_columns(comparison):
        figures = [column.figure(line) for line in comparison.stages]
        if any(figure is not None and (figure.predicted or figure.measured) for figure in figures):
            yield column


def _all_columns(comparison: Comparison) -> Iterator[_Column]:
    def of_rank(quantity: Callable[[RankFigures], Figure]) -> Callable[[StageFigures], Figure]:
        return lambda line: quantity(comparison.ranks[line.rank])

    def of_memory(quantity: Callable[[MemoryFigures], Figure]) -> Callable[[StageFigures], Figure | None]:
        return lambda line: quantity(comparison.memory[line.rank]) if comparison.memory else None

    for kind in KINDS:
        yield _Column(kind, lambda line, kind=kind: line.computes.get(kind), format_seconds, False)  # type: ignore[misc]
    yield _Column("waiting", lambda line: line.waiting, format_seconds, False)
    yield _Column("transfer", lambda line: line.transfer, format_seconds, False)
    yield _Column("overhead", lambda line: line.overhead, format_seconds, False)
    yield _Column("reduction", of_rank(lambda rank: rank.reduction), format_seconds, True)
    yield _Column("step", of_rank(lambda rank: rank.optimizer), format_seconds, True)
    if any(memory.saved.measured for memory in comparison.memory):  # not of a replayed step
        yield _Column("saved", of_memory(lambda memory: memory.saved), format_bytes, True)
    yield _Column("memory", of_memory(lambda memory: memory.total), format_bytes, True)


def _ratio(figure: Figure) -> str:
    return f"{figure.ratio:.2f}" if figure.predicted else "-"


def _footer(comparison: Comparison) -> Iterator[str]:
    step, bubble = comparison.step, comparison.bubble
    yield f"step    predicted {format_seconds(step.predicted)}, measured {format_seconds(step.measured)}" + (
        f", ratio {_ratio(step)}"
    )
    yield f"bubble  predicted {format_share(bubble.predicted)}, measured {format_share(bubble.measured)}"


def verdict(comparison: Comparison, *, threshold: float = THRESHOLD) -> list[str]:
    """Return a sentence each for step time and memory where they differ by more than a share of the prediction.

    The first names the stage or link that differs most in the direction of the step, in seconds; waiting for other
    stages is an effect and never named.
    """
    sentences = []
    step = comparison.step
    if abs(step.difference) > threshold * step.predicted:
        sentences.append(_step_sentence(comparison))
    worst = max(comparison.memory, key=lambda memory: abs(memory.total.difference), default=None)
    if worst is not None and abs(worst.total.difference) > threshold * worst.total.predicted:
        found, expected = format_bytes(worst.total.measured), format_bytes(worst.total.predicted)
        sentences.append(
            f"Rank {worst.rank} holds {found} at its peak instead of the predicted {expected}: the plan's limits are "
            f"{'too optimistic' if worst.total.difference > 0 else 'stricter than they need be'}."
        )
    return sentences


@dataclass(frozen=True)
class _Suspect:
    """A quantity that may be why a step is longer or shorter than predicted."""

    subject: str
    figure: Figure
    if_more: str
    if_less: str


def _step_sentence(comparison: Comparison) -> str:
    step = comparison.step
    sign = math.copysign(1.0, step.difference)
    suspect = max(_suspects(comparison), key=lambda suspect: sign * suspect.figure.difference)
    opening = f"The step takes {step.ratio:.2f} times as long as predicted"
    if sign * suspect.figure.difference <= 0:
        return f"{opening}, and no stage or link is to blame: ranks began or ended at other times than predicted."
    size = format_seconds(abs(suspect.figure.difference))
    direction, cause = ("more", suspect.if_more) if sign > 0 else ("less", suspect.if_less)
    return f"{opening}. Most of it: {suspect.subject} takes {size} {direction} than predicted. {cause}"


_DEVICE_SLOW = "Is the device slower than the one that was profiled, or shared with other work?"
_DEVICE_FAST = "Is the device faster than the one that was profiled, or was it shared with other work then?"
_LINK_SLOW = "Is the link slower than it was measured, or shared by several ranks?"
_LINK_FAST = "Was the link measured while other ranks used it?"
_HOST_SLOW = "The host is late with its work between computes (posting, loading): is it short of cores?"
_HOST_FAST = "The host does less between computes than was predicted."
_BETWEEN_SLOW = "Sums of gradients and results lie there, and hooks, callbacks and loggers, which are not predicted."
_STEP_SLOW = "Does the optimizer, or a hook around it, do more than when it was profiled?"
_STEP_FAST = "Does the optimizer do less than when it was profiled?"


def _suspects(comparison: Comparison) -> Iterator[_Suspect]:
    for line in comparison.stages:
        where = f"stage {line.stage} on rank {line.rank}"
        for kind, figure in line.computes.items():
            yield _Suspect(f"{kind} of {where}", figure, _DEVICE_SLOW, _DEVICE_FAST)
        yield _Suspect(f"overhead of {where}", line.overhead, _HOST_SLOW, _HOST_FAST)
    for link in comparison.links:
        subject = f"waiting for messages on their way from stage {link.source} to stage {link.target}"
        yield _Suspect(subject, link.transfer, _LINK_SLOW, _LINK_FAST)
    for rank in comparison.ranks:
        between = f"what lies between the last compute of rank {rank.rank} and its optimizer step"
        yield _Suspect(between, rank.reduction, _BETWEEN_SLOW, _LINK_FAST)
        yield _Suspect(f"the optimizer step of rank {rank.rank}", rank.optimizer, _STEP_SLOW, _STEP_FAST)
