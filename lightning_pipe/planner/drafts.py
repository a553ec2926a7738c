"""How does any schedule run on a row of devices? Drafts: the shape of its layout, with cuts that balance its stages.

Planners look for 1F1B pipelines (`planner.outline`): for the devices in a row, replicas included, and the number of
micro-batches. On such a row every other schedule makes a plan of its own, with its own shape and number of stages; the
simulator judges it. Before it is lowered, a draft is left out if one of its devices computes longer than the best
plan's whole step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_pipe.core.plan import Plan, StagePlan, microbatch_sizes
from lightning_pipe.core.program import Compute, ComputeKind, Layout
from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.planner.activations import relieve
from lightning_pipe.planner.balance import Balancer
from lightning_pipe.planner.cuts import worthwhile
from lightning_pipe.planner.estimate import Estimator, microbatch_counts
from lightning_pipe.planner.judge import Judge, Judged
from lightning_pipe.planner.outline import stage_plans
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.segments import Segments
from lightning_pipe.schedule.registry import SCHEDULES
from lightning_pipe.schedule.shapes import Device
from lightning_pipe.schedule.text import parse_order
from lightning_pipe.schedule.torch_csv import layout_of

OUTLINED = ("1f1b", "gpipe")  # schedules that planners look for themselves, one stage per device
GIVEN = "given"  # schedule of plans whose order was handed in


@dataclass(frozen=True)
class Draft:
    """A pipeline of any schedule.

    Attributes:
        cuts: graph positions at which stages 1, 2, ... begin, rising.
        layout: ranks of each stage.
        microbatches: micro-batches per batch.
        schedule: its name.
        order: computes of every rank, where they were handed in.
    """

    cuts: tuple[int, ...]
    layout: Layout
    microbatches: int
    schedule: str
    order: tuple[str, ...] = ()

    @property
    def computes(self) -> int:
        """Count the F of all ranks."""
        return sum(map(len, self.layout.stages)) * self.microbatches

    def plan(self, problem: Problem) -> Plan:
        """Return the plan with the names of the problem's graph."""
        stages = stage_plans(problem, self.cuts, self.layout.stages)
        if self.layout.whole:
            stages = tuple(StagePlan(stage.at, stage.ranks, "microbatches") for stage in stages)
        return Plan(stages, self.microbatches, self.schedule, {}, problem.graph.fingerprint, self.order)


def asks_for_drafts(problem: Problem) -> bool:
    """Say whether the wishes are for plans that are no outlines."""
    wishes = problem.wishes
    return bool(wishes.order) or wishes.schedule not in (None, *OUTLINED) or wishes.chunks not in (None, 1)


class Drafter:
    """Make drafts of one problem.

    Args:
        problem: graph, costs, devices and wishes.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._balancer = Balancer(Estimator(Segments(problem, worthwhile(problem, sliced=True))))
        self._cuts: dict[tuple[tuple[Device, ...], int], tuple[int, ...] | None] = {}

    def drafts(self, row: Sequence[Device], *, near: int) -> Iterator[Draft]:
        """Yield the drafts of the wished schedule, or of all that are no outlines, on a row of devices.

        Args:
            row: ranks of each device.
            near: micro-batches that an outline of these devices has.
        """
        wishes = self._problem.wishes
        for name in SCHEDULES if wishes.schedule is None else (wishes.schedule,):
            for chunks in SCHEDULES[name].chunks if wishes.chunks is None else (wishes.chunks,):
                if wishes.schedule is None and wishes.chunks is None and (name, chunks) in _OUTLINES:
                    continue
                yield from self._of(name, row, chunks, near)

    def _of(self, name: str, row: Sequence[Device], chunks: int, near: int) -> Iterator[Draft]:
        wishes = self._problem.wishes
        try:
            layout = SCHEDULES[name].layout(row, chunks)
        except ConfigError:
            if wishes.schedule is not None:
                raise
            return
        if wishes.replicas is not None and not asks_for_drafts(self._problem) and layout.stages != tuple(row):
            return  # the wish is for these stages
        counts = microbatch_counts(self._problem, stages=len(row), replicas=max(map(len, row)))
        for count in sorted(counts, key=lambda count: abs(count - near))[:_COUNTS]:
            if (cuts := self.cuts(layout, count)) is not None:
                yield Draft(cuts, layout, count, name)

    def given(self) -> Draft:
        """Return the draft of the wished order.

        Raises:
            PlanError: if its ranks or micro-batches are not those of the problem, or the graph is too small for its
                stages.
            ProgramError: if it cannot be read as the order of a layout.
        """
        problem = self._problem
        order = parse_order(problem.wishes.order)
        layout = layout_of(order)
        count = 1 + max(compute.microbatch for line in order for compute in line)
        if layout.ranks != problem.cluster.ranks:
            raise PlanError(
                f"The given order is of {layout.ranks} ranks, the trainer has {problem.cluster.ranks}. Change "
                "`devices` (times `num_nodes`), or the file."
            )
        if problem.wishes.microbatches not in (None, count):
            raise PlanError(
                f"The given order is of {count} micro-batches, but microbatches={problem.wishes.microbatches} is set. "
                "Remove one of them."
            )
        cuts = self.cuts(layout, count)
        if cuts is None:
            raise self.too_small(len(layout.stages))
        return Draft(cuts, layout, count, GIVEN, problem.wishes.order)

    def cuts(self, layout: Layout, microbatches: int) -> tuple[int, ...] | None:
        """Return cuts that balance the stages of a layout; None if the graph has too few places."""
        key = (layout.stages, microbatches)
        if key not in self._cuts:
            ranks = tuple(group[:1] if layout.whole else group for group in layout.stages)
            self._cuts[key] = next(iter(self._balancer.variants(ranks, microbatches)), None)
        return self._cuts[key]

    def too_small(self, stages: int) -> PlanError:
        """Return the error for a graph that has fewer places to cut than stages are wanted."""
        return PlanError(
            f"The step has {len(self._problem.graph.nodes)} operations, too few places to cut for {stages} stages. Use "
            "fewer devices or chunks, or another schedule."
        )


_COUNTS = 2  # numbers of micro-batches that are tried
_OUTLINES = frozenset((name, 1) for name in OUTLINED)


def judged_drafts(problem: Problem, found: Sequence[Judged], *, judge: Judge) -> list[Judged]:
    """Judge drafts on the rows of devices of plans that were found.

    Args:
        problem: what is planned.
        found: plans of outlines, the best first.
        judge: of the same problem.

    Returns:
        What was judged, the best first. Where nothing is wished, drafts are left out that cannot be better than what
        was found, or are too long to be judged.

    Raises:
        ConfigError: if the wished schedule cannot run on any of these rows.
        PlanError: if the graph is too small for the wished stages.
    """
    drafter, wished = Drafter(problem), asks_for_drafts(problem)
    rows = [(plan.layout.stages, plan.microbatches) for plan in (one.plan for one in found)]
    judged: list[Judged] = []
    left = _INSTRUCTIONS
    for row, near in _different(rows):
        for draft in drafter.drafts(row, near=near):
            length = draft.computes * _PER_COMPUTE
            if not wished and (length > left or not _may_win(draft, found[0], problem, judge)):
                continue
            left -= length
            one = judge.judge(draft.plan(problem))
            is_short = one.overflow(problem.cluster) > 0 and bool(problem.wishes.reliefs)
            judged.append(relieve(problem, one, judge=judge) if is_short else one)
    if wished and not judged:
        raise drafter.too_small(len(rows[0][0]) * (problem.wishes.chunks or 1))
    return sorted(judged, key=lambda one: one.rank(problem.cluster))


_ROWS = 2  # rows of devices on which drafts are made
_PER_COMPUTE = 8  # instructions of a stage's replica per micro-batch
_INSTRUCTIONS = 60_000  # that are judged where no schedule is wished, about twenty microseconds each


def _different(rows: Iterable[tuple[tuple[Device, ...], int]]) -> list[tuple[tuple[Device, ...], int]]:
    """Return the first rows that differ in their devices, with what came with them."""
    first: dict[tuple[Device, ...], int] = {}
    for row, near in rows:
        first.setdefault(row, near)
    return list(first.items())[:_ROWS]


def _may_win(draft: Draft, best: Judged, problem: Problem, judge: Judge) -> bool:
    """Say whether no device of a draft computes for longer than the best plan's step."""
    if best.overflow(problem.cluster) > 0:
        return True
    prices = judge.pricer.price(draft.cuts, draft.layout)
    sizes = microbatch_sizes(problem.samples, draft.microbatches)
    busy = [0.0] * draft.layout.ranks
    for s, ranks in enumerate(draft.layout.stages):
        for (replica, rank), m in itertools.product(enumerate(ranks), range(len(sizes))):
            samples = len(draft.layout.samples(s, replica, m, sizes[m]))
            if samples:
                busy[rank] += sum(prices.compute_s(Compute(s, kind, m), rank, samples) for kind in _KINDS)
    return max(busy) < best.step_s


_KINDS: tuple[ComputeKind, ...] = ("F", "I", "W")
