"""Comparison of prediction and measurement: quantities of the simulated and the recorded timelines.

Quantities are those of `report.account`, in seconds per step, by the same definitions on both sides; of several
recorded steps the (lower) median is taken, each quantity for itself (so medians need not add up). Seconds and bubble of
the whole step are those of one step, the typical one, whose seconds are the median: the one to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median_low

from lightning_pipe.core.program import ComputeKind, Layout
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.errors import PlanError
from lightning_pipe.report.account import Account, Gap, Link, accounts, mean_bubble, step_seconds

KINDS: tuple[ComputeKind, ...] = ("F", "I", "W", "B")


@dataclass(frozen=True)
class Figure:
    """A quantity as predicted and as measured."""

    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """Return measured minus predicted."""
        return self.measured - self.predicted

    @property
    def ratio(self) -> float:
        """Return measured over predicted; infinite if nothing was predicted and something measured."""
        if self.predicted:
            return self.measured / self.predicted
        return math.inf if self.measured else 1.0


@dataclass(frozen=True)
class RankPeak:
    """Peak bytes of one rank.

    Attributes:
        saved_bytes: of what its stages keep for their backward.
        total_bytes: of everything: parameters, gradients, optimizer state, values kept, buffers, workspace.
    """

    saved_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class StageFigures:
    """Seconds per step of one stage on one rank.

    Attributes:
        stage: the stage.
        rank: the rank.
        computes: of every kind of compute that was predicted or measured.
        waiting: idle before computes of this stage, within the rank's own span.
        transfer: idle while a message that a compute needs was on its way, also before the rank's first compute.
        overhead: idle although everything was there.
    """

    stage: int
    rank: int
    computes: Mapping[ComputeKind, Figure]
    waiting: Figure
    transfer: Figure
    overhead: Figure


@dataclass(frozen=True)
class RankFigures:
    """What belongs to a rank and to none of its stages: seconds per step, and the bubble as a share of its span."""

    rank: int
    reduction: Figure
    optimizer: Figure
    bubble: Figure


@dataclass(frozen=True)
class LinkFigures:
    """Seconds per step that ranks of stage `target` stood idle while a message of `source` was on its way, summed."""

    source: int
    target: int
    transfer: Figure


@dataclass(frozen=True)
class MemoryFigures:
    """Peak bytes of a rank."""

    rank: int
    saved: Figure
    total: Figure


@dataclass(frozen=True)
class Comparison:
    """A step as predicted and as measured.

    Attributes:
        stages: by stage and replica.
        ranks: by rank.
        links: by pair of stages.
        memory: by rank; empty where memory was not compared.
        step: seconds of the step, from its first load or compute to the last end of any rank.
        bubble: mean over the ranks.
        steps: number of recorded steps.
        typical: number of the recorded step whose seconds are the median.
    """

    stages: tuple[StageFigures, ...]
    ranks: tuple[RankFigures, ...]
    links: tuple[LinkFigures, ...]
    memory: tuple[MemoryFigures, ...]
    step: Figure
    bubble: Figure
    steps: int
    typical: int


def compare(
    predicted: Timeline,
    measured: Sequence[Timeline],
    *,
    layout: Layout,
    predicted_memory: Sequence[RankPeak] = (),
    measured_memory: Sequence[RankPeak] = (),
) -> Comparison:
    """Return every quantity of a step as predicted and as measured.

    Args:
        predicted: simulated timeline of the program.
        measured: recorded timelines of all ranks, one per step, each on one clock (`report.clocks`).
        layout: ranks of each stage.
        predicted_memory: by rank, or nothing.
        measured_memory: by rank, or nothing.

    Raises:
        PlanError: if nothing was measured, or a timeline has other ranks than the layout.
    """
    for timeline in (predicted, *measured):
        if timeline.ranks != tuple(range(layout.ranks)):
            raise PlanError(f"found events of ranks {timeline.ranks}; expected those of all {layout.ranks} ranks")
    if not measured:
        raise PlanError("found no recorded step; expected at least one to compare with the prediction")
    steps = _Steps(accounts(predicted), [accounts(timeline) for timeline in measured])
    seconds = [step_seconds(timeline) for timeline in measured]
    typical = seconds.index(median_low(seconds))
    pairs = zip(predicted_memory, measured_memory, strict=True)
    return Comparison(
        stages=tuple(_stage(s, rank, steps) for s, ranks in enumerate(layout.stages) for rank in ranks),
        ranks=tuple(_rank(rank, predicted, measured, steps) for rank in range(layout.ranks)),
        links=tuple(_links(steps)),
        memory=tuple(MemoryFigures(rank, *_memory(before, after)) for rank, (before, after) in enumerate(pairs)),
        step=Figure(step_seconds(predicted), seconds[typical]),
        bubble=Figure(mean_bubble(predicted), mean_bubble(measured[typical])),
        steps=len(measured),
        typical=typical,
    )


@dataclass(frozen=True)
class _Steps:
    """Accounts of all ranks, in the predicted step and in every measured one."""

    predicted: tuple[Account, ...]
    measured: list[tuple[Account, ...]]

    def of_rank(self, rank: int, quantity: Callable[[Account], float]) -> Figure:
        return Figure(quantity(self.predicted[rank]), median_low(quantity(step[rank]) for step in self.measured))

    def of_all(self, quantity: Callable[[Account], float]) -> Figure:
        """Return a quantity summed over the ranks."""
        sums = [sum(quantity(account) for account in step) for step in (self.predicted, *self.measured)]
        return Figure(sums[0], median_low(sums[1:]))

    def all(self) -> Iterable[Account]:
        return chain(self.predicted, *self.measured)


def _figure(quantity: Callable[[Timeline], float], predicted: Timeline, measured: Sequence[Timeline]) -> Figure:
    return Figure(quantity(predicted), median_low(quantity(timeline) for timeline in measured))


def _stage(stage: int, rank: int, steps: _Steps) -> StageFigures:
    def gaps(seconds: Callable[[Gap], float]) -> Figure:
        return steps.of_rank(rank, lambda account: sum(seconds(g) for g in account.gaps if g.compute.stage == stage))

    def computing(kind: ComputeKind) -> Figure:
        return steps.of_rank(rank, lambda account: account.computes.get((stage, kind), 0.0))

    found = {key for account in steps.all() if account.rank == rank for key in account.computes}
    return StageFigures(
        stage,
        rank,
        computes={kind: computing(kind) for kind in KINDS if (stage, kind) in found},
        waiting=gaps(lambda gap: 0.0 if gap.first else gap.late + gap.transfer + gap.swap + gap.overhead),
        transfer=gaps(lambda gap: gap.transfer),
        overhead=gaps(lambda gap: gap.overhead),
    )


def _rank(rank: int, predicted: Timeline, measured: Sequence[Timeline], steps: _Steps) -> RankFigures:
    return RankFigures(
        rank,
        reduction=steps.of_rank(rank, lambda account: account.reduction),
        optimizer=steps.of_rank(rank, lambda account: account.optimizer),
        bubble=_figure(lambda timeline: timeline.bubble(rank), predicted, measured),
    )


def _links(steps: _Steps) -> Iterable[LinkFigures]:
    links = {gap.link for account in steps.all() for gap in account.gaps if gap.link is not None}
    for source, target in sorted(links):

        def seconds(account: Account, link: Link = (source, target)) -> float:
            return sum(gap.transfer for gap in account.gaps if gap.link == link)

        yield LinkFigures(source, target, steps.of_all(seconds))


def _memory(predicted: RankPeak, measured: RankPeak) -> tuple[Figure, Figure]:
    saved = Figure(predicted.saved_bytes, measured.saved_bytes)
    return saved, Figure(predicted.total_bytes, measured.total_bytes)
