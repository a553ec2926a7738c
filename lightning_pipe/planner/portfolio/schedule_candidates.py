"""Candidates of any schedule on a row of devices: its layout's shape, with cuts that balance its stages.

Cuts are balanced for several prices of messages, and those of the best outlines of the same shape are tried too: a cut
that is right for 1F1B is right, or close to it, for schedules that only move weight halves.

Planners look for 1F1B pipelines (`candidate`): for the devices in a row, replicas included, and the number of
micro-batches. On such a row every other schedule makes a plan of its own, with its own shape and number of stages; the
simulator judges it. Before it is lowered, a draft is left out if one of its devices computes longer than the best
plan's whole step.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lightning_pipe.core.cluster import NO_SWAP
from lightning_pipe.core.plan import Plan, StagePlan, microbatch_sizes
from lightning_pipe.core.program import Compute, ComputeKind, Layout
from lightning_pipe.cost.prices import PlanPrices
from lightning_pipe.errors import ConfigError, PipeError, PlanError
from lightning_pipe.planner.candidates.candidate import stage_plans
from lightning_pipe.planner.candidates.cut_places import too_few_places
from lightning_pipe.planner.candidates.cut_points import worthwhile
from lightning_pipe.planner.estimates.balance import Balancer
from lightning_pipe.planner.estimates.recurrence import Estimator, microbatch_counts
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.evaluation.heads import needs_forwards_first
from lightning_pipe.planner.evaluation.resolve import places_of
from lightning_pipe.planner.memory.settle import squeezed
from lightning_pipe.planner.problem import Problem
from lightning_pipe.schedule.construct.device_orders import computes_only
from lightning_pipe.schedule.construct.layout_shapes import Device
from lightning_pipe.schedule.formats.text import parse_order
from lightning_pipe.schedule.formats.torch_csv import layout_of
from lightning_pipe.schedule.registry import (
    SCHEDULES,
    TimedSchedule,
    decides_copies,
    joined,
    options_with_forwards_first,
)

OUTLINED = ("1f1b", "gpipe")  # schedules that planners look for themselves, one stage per device
Row: TypeAlias = tuple[Device, ...]
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
        options = dict(options_with_forwards_first(self.schedule)) if needs_forwards_first(problem) else {}
        return Plan(stages, self.microbatches, self.schedule, options, problem.graph.fingerprint, self.order)


def asks_for_drafts(problem: Problem) -> bool:
    """Return whether the constraints are for plans that are no outlines."""
    constraints = problem.constraints
    return (
        bool(constraints.order)
        or constraints.schedule not in (None, *OUTLINED)
        or constraints.stages_per_device not in (None, 1)
    )


class ScheduleCandidates:
    """Make drafts of one problem.

    Args:
        problem: graph, costs, devices and constraints.
        outlines: plans whose cuts are tried as well, the best first.
    """

    def __init__(self, problem: Problem, outlines: Sequence[Judged] = ()) -> None:
        self._problem = problem
        self._balancer = Balancer(Estimator(StageCostTable(problem, worthwhile(problem, sliced=True))))
        self._cuts: dict[tuple[tuple[Device, ...], int], tuple[tuple[int, ...], ...]] = {}
        self._outlined: dict[Row, list[tuple[int, ...]]] = defaultdict(list)
        for outline in outlines:
            self._outlined[outline.plan.layout.stages].append(outline.cuts)

    def drafts(self, rows: Mapping[Row, int]) -> Iterator[Draft]:
        """Yield the drafts of the wished schedule, or of all that are no outlines: first one for every shape.

        Args:
            rows: ranks of the devices, with about how many micro-batches suit them.

        Raises:
            ConfigError: if a schedule is wished, and cannot run on any of the rows.
            PlanError: if a schedule or stages per device are wished, and the graph is too small for its stages.
        """
        constraints = self._problem.constraints
        names = _tried() if constraints.schedule is None else [constraints.schedule]
        refused, made = list[PipeError](), list[tuple[int, Draft]]()
        for (row, near), name in itertools.product(rows.items(), names):
            asked = constraints.stages_per_device
            for v in SCHEDULES[name].stages_per_device if asked is None else (asked,):
                try:
                    made += self._of(name, row, v, near)
                except (ConfigError, PlanError) as error:
                    refused.append(error)
        if not made and refused and asks_for_drafts(self._problem):
            raise refused[0]
        yield from (draft for _, draft in sorted(made, key=lambda pair: pair[0]))

    def _of(self, name: str, row: Row, v: int, near: int) -> Iterator[tuple[int, Draft]]:
        """Yield the drafts of a schedule on a row, each with the number of its cuts."""
        constraints, is_wished = self._problem.constraints, asks_for_drafts(self._problem)
        if not is_wished and (name, v) in _OUTLINES:
            return
        layout = SCHEDULES[name].layout(row, v)
        if not is_wished and constraints.replicas is not None and layout.stages != row:
            return  # the wish is for these stages
        counts = microbatch_counts(self._problem, stages=len(row), replicas=max(map(len, row)))
        for count in sorted(counts, key=lambda count: abs(count - near))[:_COUNTS]:
            outlined = self._outlined.get(layout.stages, [])[:_OUTLINED_CUTS]
            for number, cuts in enumerate(dict.fromkeys([*self.cuts(layout, count), *outlined])):
                yield number, Draft(cuts, layout, count, name)

    def given(self) -> list[Draft]:
        """Return the drafts of the wished order.

        Raises:
            PlanError: if its ranks or micro-batches are not those of the problem, a batch has too few samples, or the
                graph is too small for its stages.
            ProgramError: if it cannot be read as the order of a layout.
        """
        problem = self._problem
        lines = parse_order(problem.constraints.order)
        layout = layout_of(computes_only(lines))
        count = 1 + max(compute.microbatch for line in lines for compute in line)
        if layout.ranks != problem.cluster.ranks:
            raise PlanError(
                f"The given order is of {layout.ranks} ranks, the trainer has {problem.cluster.ranks}. Change "
                "`devices` (times `num_nodes`), or the file."
            )
        if problem.constraints.microbatches not in (None, count):
            raise PlanError(
                f"The given order is of {count} micro-batches, but microbatches={problem.constraints.microbatches} "
                "is set. Remove one of them."
            )
        problem.check_samples(count)
        order = problem.constraints.order
        return [Draft(cuts, layout, count, GIVEN, order) for cuts in self.cuts(layout, count)]

    def cuts(self, layout: Layout, microbatches: int) -> tuple[tuple[int, ...], ...]:
        """Return cuts that balance the stages of a layout, for rising prices of messages.

        Raises:
            PlanError: if the graph has too few places for them.
        """
        key = (layout.stages, microbatches)
        ranks = tuple(group[:1] if layout.whole else group for group in layout.stages)
        if key not in self._cuts:
            self._cuts[key] = tuple(self._balancer.variants(ranks, microbatches))
        if not self._cuts[key]:
            raise too_few_places(
                self._problem.graph,
                stages=len(layout.stages),
                sliced=len({len(group) for group in ranks}) > 1,
                advice="Use fewer devices or stages per device, or another schedule.",
            )
        return self._cuts[key]


def _tried() -> list[str]:
    """Return the schedules that are tried where none is wished."""
    return [name for name, one in SCHEDULES.items() if not (isinstance(one, TimedSchedule) and one.is_slow)]


_COUNTS = 2  # numbers of micro-batches that are tried
_OUTLINED_CUTS = 2  # of outlines, that are tried
_OUTLINES = frozenset((name, 1) for name in OUTLINED)


def judged_drafts(problem: Problem, found: Sequence[Judged], *, judge: Judge) -> list[Judged]:
    """Judge drafts on the rows of devices of plans that were found, and on the row of single devices.

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
    drafter, wished = ScheduleCandidates(problem, found), asks_for_drafts(problem)
    left, judged, best = _INSTRUCTIONS, list[Judged](), found[0]
    refused: list[ConfigError] = []
    for draft in drafter.drafts(_rows(found, problem)):
        length = draft.computes * _PER_COMPUTE
        if not wished and (length > left or not _may_win(draft, best, problem, judge)):
            continue
        left -= length
        try:
            one = judge.judge(draft.plan(problem))
        except ConfigError as error:  # where nodes mix samples, replicas may have to take whole micro-batches
            refused.append(error)
            continue
        for candidate in (one, *_joined(one, judge)):
            variants = [candidate, *squeezed(problem, [candidate], judge=judge), *_copying(problem, candidate, judge)]
            judged.append(min(variants, key=lambda one: one.rank(problem.cluster)))
            best = min(best, judged[-1], key=lambda one: one.rank(problem.cluster))
    if wished and refused and not judged:
        raise refused[0]
    return sorted(judged, key=lambda one: one.rank(problem.cluster))


def best_exact(problem: Problem, plan: Plan) -> Judged:
    """Return the best plan without late gradients on the devices of a pipeline, whatever its schedule.

    Args:
        problem: what is planned, for pipelines that are flushed.
        plan: of one stage per device; its micro-batches stay.
    """
    constraints = replace(problem.constraints, replicas=None, microbatches=plan.microbatches)
    problem = replace(problem, constraints=constraints)
    judge = Judge(problem)
    flushed = judge.judge(plan)
    return min([flushed, *judged_drafts(problem, [flushed], judge=judge)], key=lambda one: one.rank(problem.cluster))


_WORTH = 0.01  # of the step, that joined W must save: they add gradients in another order, and need copies


def _joined(one: Judged, judge: Judge) -> Iterator[Judged]:
    """Yield a plan with W of several micro-batches as one product, where that can be done and is worth it."""
    plan = joined(one.plan) if one.program.traffic.joinable else None
    if plan is not None and plan.microbatches > 1:
        found = judge.judge(plan)
        if found.step_s < one.step_s * (1 - _WORTH):
            yield found


def _copying(problem: Problem, one: Judged, judge: Judge) -> Iterator[Judged]:
    """Yield a plan whose schedule decides what is offloaded when, where some rank cannot hold all micro-batches."""
    hosts, constraints = problem.cluster.hosts, problem.constraints
    may_offload = "offload" in constraints.memory_policies and NO_SWAP not in [host.swap for host in hosts]
    if not decides_copies(one.plan) or not may_offload:
        return
    needed = [_bytes_of_all(one, rank) for rank in range(problem.cluster.ranks)]
    if any(need > problem.cluster.device(rank).memory_bytes for rank, need in enumerate(needed)):
        stages = (
            replace(stage, offload=places_of(problem.graph, work, work.saved))
            for stage, work in zip(one.plan.stages, judge.pricer.works(one.cuts), strict=True)
        )
        yield judge.judge(replace(one.plan, stages=tuple(stages), order=()))


def _bytes_of_all(one: Judged, rank: int) -> int:
    """Return what a rank would hold if it kept all micro-batches at once."""
    layout, saved = one.program.layout, 0
    for s, ranks in enumerate(layout.stages):
        for m, size in enumerate(one.program.sizes if rank in ranks else ()):
            saved += one.prices.saved_bytes(s, len(layout.samples(s, ranks.index(rank), m, size)))
    return one.curves[rank].state_bytes + saved


_ROWS = 2  # rows of devices of plans on which drafts are made
_PER_COMPUTE = 8  # instructions of a stage's replica per micro-batch
_INSTRUCTIONS = 60_000  # that are judged where no schedule is wished, about twenty microseconds each


def _rows(found: Sequence[Judged], problem: Problem) -> dict[Row, int]:
    """Return rows of devices, each with about how many micro-batches suit it; several devices, where there are any."""
    rows: dict[Row, int] = {}
    for plan in (one.plan for one in found):
        if len(plan.stages) > 1 or problem.cluster.ranks == 1:
            rows.setdefault(plan.layout.stages, plan.microbatches)
    rows = dict(itertools.islice(rows.items(), _ROWS))
    if problem.constraints.replicas is None:
        ranks = [rank for device in found[0].plan.layout.stages for rank in device]
        rows.setdefault(tuple((rank,) for rank in ranks), max(found[0].plan.microbatches, _PER_STAGE * len(ranks)))
    return rows or {found[0].plan.layout.stages: found[0].plan.microbatches}


_PER_STAGE = 2  # micro-batches per stage that a row of single devices is tried with


def _may_win(draft: Draft, best: Judged, problem: Problem, judge: Judge) -> bool:
    """Return whether a draft may be quicker than the best plan, or smaller if that exceeds memory."""
    prices = judge.pricer.price(draft.cuts, draft.layout)
    if (excess := best.overflow(problem.cluster)) > 0:
        return _least_overflow(draft, prices, problem) < excess
    return _least_s(draft, prices, problem) < best.step_s


def _least_overflow(draft: Draft, prices: PlanPrices, problem: Problem) -> float:
    """Return by how many bytes a device exceeds its memory at least: all its stages hold one micro-batch at once."""
    size = min(microbatch_sizes(problem.samples, draft.microbatches))
    least = -math.inf
    for rank in range(draft.layout.ranks):
        held = [(s, ranks) for s, ranks in enumerate(draft.layout.stages) if rank in ranks]
        saved = 0.0
        if not problem.constraints.memory_policies and not draft.layout.whole:
            saved = sum(prices.saved_bytes(s, size // len(ranks)) for s, ranks in held)
        least = max(least, prices.state_bytes(rank) + saved - problem.cluster.device(rank).memory_bytes)
    return least


def _least_s(draft: Draft, prices: PlanPrices, problem: Problem) -> float:
    """Return the seconds of a draft at least, in whatever order its devices compute.

    A device computes nothing before the forwards of the stages before its first one, and after the last input gradient
    of its stages come those of the stages before them; weight halves may come last. Where ranks run ahead, a device
    computes for the next batch meanwhile.
    """
    sizes = microbatch_sizes(problem.samples, draft.microbatches)
    alike = Counter((size, m if draft.layout.whole else 0) for m, size in enumerate(sizes))
    busy, late = ([0.0] * draft.layout.ranks for _ in range(2))
    head, tail = ([math.inf] * draft.layout.ranks for _ in range(2))
    before = [0.0, 0.0]  # seconds of F, and of I, of the stages before
    for s, ranks in enumerate(draft.layout.stages):
        quickest = [math.inf, math.inf]
        for (replica, rank), ((size, m), count) in itertools.product(enumerate(ranks), alike.items()):
            samples = len(draft.layout.samples(s, replica, m, size))
            if samples:
                times = [prices.compute_s(Compute(s, kind, m), rank, samples) for kind in _KINDS]
                busy[rank] += count * sum(times)
                late[rank] += count * times[2]
                quickest = [min(pair) for pair in zip(quickest, times, strict=False)]
                head[rank], tail[rank] = min(head[rank], before[0]), min(tail[rank], before[1])
        before = [sum(pair) for pair in zip(before, quickest, strict=True)]
    if problem.runs_ahead:
        return max(busy)
    ends = (h + max(b, b - w + t) for h, b, w, t in zip(head, busy, late, tail, strict=True) if b)
    return max(ends) + min(map(prices.step_s, range(draft.layout.ranks)))


_KINDS: tuple[ComputeKind, ...] = ("F", "I", "W")
