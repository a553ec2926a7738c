"""Comparison table: step time as predicted and measured, and a sentence on the largest difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.table import Table

from lightning_pipe.report.comparison import KINDS, Comparison, Figure, MemoryFigures, RankFigures, StageFigures
from lightning_pipe.report.table import WIDE, text_of
from lightning_pipe.units import format_bytes, format_seconds, format_share, numbers_text

NOTICEABLE = 0.01  # of a step: ratios of shorter times say nothing
THRESHOLD = 0.25  # share by which a step may differ from its prediction before it is worth a sentence


def comparison_table(
    comparison: Comparison,
    *,
    threshold: float = THRESHOLD,
    width: int = WIDE,
    brief: bool = False,
    is_disturbed: bool = False,
) -> str:
    """Return the table of `comparison_grid` as text, with step and bubble, and a verdict below.

    Args:
        comparison: what to show.
        threshold: share by which step time or memory may differ before a sentence says where most of it comes from.
        width: characters per line.
        brief: as for `comparison_grid`.
        is_disturbed: as for `verdict`.
    """
    table = text_of(comparison_grid(comparison, brief=brief), width)
    return "\n".join(
        [table, "", *_footer(comparison), *verdict(comparison, threshold=threshold, is_disturbed=is_disturbed)]
    )


def comparison_grid(comparison: Comparison, *, brief: bool = False) -> Table:
    """Return predicted and measured seconds and bytes of every stage and rank as a table.

    Quantities that are nowhere predicted nor measured have no column. What belongs to a rank (reduction, step, memory)
    stands in the line of its first stage. Ratios of less than 1 % of the step are left out.

    Args:
        comparison: what to show.
        brief: whether a rank has one row for all its stages, ranks with the same stages share it, with the median of
            each figure, and ratios are left out.
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
    least_s = NOTICEABLE * comparison.step.measured
    seen: set[int] = set()
    for row in _rows(comparison.stages, by_rank=brief):
        ranks = [lines[0].rank for lines in row]
        of_rank = seen.isdisjoint(ranks)
        seen.update(ranks)
        figures = [column.of_row(row) if of_rank or not column.of_rank else None for column in columns]
        cells = (
            column.written(figure, brief=brief, least_s=least_s)
            for column, figure in zip(columns, figures, strict=True)
        )
        stages = numbers_text(line.stage for line in row[0])
        table.add_row(stages, numbers_text(ranks), names, *cells, end_section=not brief)
    return table


def _rows(stages: Sequence[StageFigures], *, by_rank: bool) -> Iterator[Sequence[Sequence[StageFigures]]]:
    """Yield what shares a row, rank by rank: one stage of one rank, or all stages of ranks that hold the same."""
    if not by_rank:
        yield from ([[line]] for line in stages)
        return
    of_rank: dict[int, list[StageFigures]] = {}
    for line in stages:
        of_rank.setdefault(line.rank, []).append(line)
    alike: dict[tuple[int, ...], list[list[StageFigures]]] = {}
    for lines in of_rank.values():
        alike.setdefault(tuple(line.stage for line in lines), []).append(lines)
    yield from alike.values()


@dataclass(frozen=True)
class _Column:
    """A quantity: how to find it for a stage on a rank, and how to write it."""

    heading: str
    figure: Callable[[StageFigures], Figure | None]
    write: Callable[[float], str]
    of_rank: bool

    def of_row(self, row: Sequence[Sequence[StageFigures]]) -> Figure | None:
        """Return the sum over the stages of a rank (what is of the rank counts once), the median over ranks."""
        sums = [
            Figure(sum(figure.predicted for figure in figures), sum(figure.measured for figure in figures))
            for lines in row
            if (figures := [f for f in map(self.figure, lines[:1] if self.of_rank else lines) if f is not None])
        ]
        if not sums:
            return None
        return Figure(median(f.predicted for f in sums), median(f.measured for f in sums))

    def written(self, figure: Figure | None, *, brief: bool, least_s: float) -> str:
        if figure is None:
            return ""
        cells = [self.write(figure.predicted), self.write(figure.measured)]
        if not brief:
            is_small = self.write is format_seconds and max(figure.predicted, figure.measured) < least_s
            cells.append("" if is_small else _ratio(figure))
        return "\n".join(cells)


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


def verdict(comparison: Comparison, *, threshold: float = THRESHOLD, is_disturbed: bool = False) -> list[str]:
    """Return a sentence each for step time and memory where they differ by more than a share of the prediction.

    The first names the stage or link that differs most in the direction of the step, in seconds; waiting for other
    stages is an effect and never named.

    Args:
        comparison: what to judge.
        threshold: share of the prediction.
        is_disturbed: whether other work took a part of the processor while what is predicted from was measured: then
            no cause is named.
    """
    sentences = []
    step = comparison.step
    if abs(step.difference) > threshold * step.predicted:
        sentences.append(f"{_opening(comparison)} {_DISTURBED}" if is_disturbed else _step_sentence(comparison))
    worst = max(comparison.memory, key=lambda memory: abs(memory.total.difference), default=None)
    if worst is not None and abs(worst.total.difference) > threshold * worst.total.predicted:
        measured, predicted = format_bytes(worst.total.measured), format_bytes(worst.total.predicted)
        sentences.append(
            f"Measured: rank {worst.rank} holds {measured} at its peak; predicted: {predicted}. The plan's limits are "
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
    opening = _opening(comparison)
    if sign * suspect.figure.difference <= 0:
        return f"{opening} No stage or link is the cause: ranks began or ended at other times than predicted."
    size = format_seconds(abs(suspect.figure.difference))
    direction, cause = ("longer", suspect.if_more) if sign > 0 else ("less", suspect.if_less)
    return f"{opening} Largest cause: {suspect.subject} took {size} {direction} than predicted. {cause}"


def _opening(comparison: Comparison) -> str:
    return f"Measured: the step takes {comparison.step.ratio:.2f}x the predicted time."


_DISTURBED = "Other work took a part of the processor while operations were timed, which may be all that differs."
_DEVICE_SLOW = "Is the device slower than the profiled one, or shared with other work?"
_DEVICE_FAST = "Is the device faster than the profiled one, or was it shared with other work then?"
_LINK_SLOW = "Is the link slower than it was measured, or shared by several ranks?"
_LINK_FAST = "Was the link measured while other ranks used it?"
_HOST_SLOW = "The host is late with its work between passes (posting, loading): is it short of cores?"
_HOST_FAST = "The host does less between passes than predicted."
_BETWEEN_SLOW = "Hooks, callbacks and loggers run there too, and are not predicted."
_STEP_SLOW = "Does the optimizer, or a hook around it, do more than when it was profiled?"
_STEP_FAST = "Does the optimizer do less than when it was profiled?"
_PASSES = {"F": "forward pass", "I": "input-gradient pass", "W": "weight-gradient pass", "B": "backward pass"}


def _suspects(comparison: Comparison) -> Iterator[_Suspect]:
    for line in comparison.stages:
        where = f"stage {line.stage} on rank {line.rank}"
        for kind, figure in line.computes.items():
            yield _Suspect(f"the {_PASSES[kind]} of {where}", figure, _DEVICE_SLOW, _DEVICE_FAST)
        yield _Suspect(f"the overhead of {where}", line.overhead, _HOST_SLOW, _HOST_FAST)
    for link in comparison.links:
        subject = f"waiting for messages from stage {link.source} to stage {link.target}"
        yield _Suspect(subject, link.transfer, _LINK_SLOW, _LINK_FAST)
    for rank in comparison.ranks:
        between = f"the time between rank {rank.rank}'s last backward and its optimizer step (gradient all-reduce)"
        yield _Suspect(between, rank.reduction, _BETWEEN_SLOW, _LINK_FAST)
        yield _Suspect(f"the optimizer step of rank {rank.rank}", rank.optimizer, _STEP_SLOW, _STEP_FAST)
