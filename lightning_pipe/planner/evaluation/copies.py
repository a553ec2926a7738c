"""Copies to the host beside computes: after how many of them a rank waits for the end of one (`StagePlan.beside_copy`).

As many as start before the copy has ended, by a timeline in which nobody waits for it: for every stage the most of all
its micro-batches and ranks. So a rank that copies as fast as was foreseen never waits, and one that copies more slowly
waits instead of holding more. (In that timeline every micro-batch leaves. Where some are kept then, since they would be
back too soon, computes go faster, and a rank may wait for a slow link.) Fewer computes beside a copy hold less, and let
even a rank wait that copies as foreseen (`tighter`).

    F0 |==|                          the copy ends while the third compute behind F0 runs: three computes are beside it,
    copy   |-----------|             and `VACATE` comes before the fourth
    computes  |==| |==| |==| |==|
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from lightning_pipe.core.plan import Plan
from lightning_pipe.core.program import Compute, Evict, Program
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.schedule.registry import stages_placed

_ROUNDING = 1e-9  # of the time at which a copy ends, by which a compute may start before it


def is_open(plan: Plan, offloads: tuple[int, ...]) -> bool:
    """Return whether a stage that offloads leaves it open how many computes run beside a copy."""
    free = [stage for stage in offloads if plan.stages[stage].beside_copy is None]
    return bool(free) and not stages_placed(plan).issuperset(free)


def with_copies(plan: Plan, timeline: Timeline, offloads: tuple[int, ...]) -> Plan:
    """Return the plan with what its stages leave open.

    Args:
        plan: the plan.
        timeline: of its program, in which no rank waits for the end of a copy to the host before it needs to.
        offloads: the stages that offload.
    """
    counts: dict[int, int] = defaultdict(int)
    starts = {rank: [event.start for event in timeline.computes(rank)] for rank in timeline.ranks}
    behind = {
        (rank, event.instruction.stage, event.instruction.microbatch): number + 1
        for rank in timeline.ranks
        for number, event in enumerate(timeline.computes(rank))
        if isinstance(event.instruction, Compute) and event.instruction.kind == "F"
    }
    for event in timeline.events:
        match event.instruction:
            case Evict(stage, microbatch):
                started = bisect_left(starts[event.rank], event.end * (1 - _ROUNDING))
                counts[stage] = max(counts[stage], started - behind[event.rank, stage, microbatch])
            case _:
                pass
    stages = tuple(
        replace(stage, beside_copy=counts[s]) if s in offloads and stage.beside_copy is None else stage
        for s, stage in enumerate(plan.stages)
    )
    return replace(plan, stages=stages)


def offloading_in_vain(plan: Plan, program: Program) -> list[int]:
    """Return the stages that offload by the plan, and of which nothing leaves in its program."""
    leaving = {x.stage for line in program.ranks for x in line if isinstance(x, Evict)}
    return [s for s, stage in enumerate(plan.stages) if stage.offload and s not in leaving]


def tighter(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with fewer and fewer computes beside the copies of its stages, down to none."""
    most = max((stage.beside_copy or 0 for stage in plan.stages), default=0)
    for count in range(min(most, _TIGHTER + 1) - 1, -1, -1):
        stages = (
            stage if stage.beside_copy is None else replace(stage, beside_copy=min(count, stage.beside_copy))
            for stage in plan.stages
        )
        yield replace(plan, stages=tuple(stages))


_TIGHTER = 2  # computes beside a copy that are tried first: F and W, or I and W, of one micro-batch
