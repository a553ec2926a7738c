"""Laws of copies to the host beside computes: as foreseen nobody waits, and fewer computes hold no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipe.core.cluster import Link
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.program import AnyCompute, OwnWork, Vacate
from lightning_pipe.cost.stage import Cutter
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged, judge
from lightning_pipe.planner.evaluation.resolve import places_of
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import propose
from parity.training import problem_of

RANKS, MICROBATCHES = 2, 8


def offloading(schedule: str, rate: float) -> tuple[Problem, Plan]:
    """Return a plan whose stages offload all they save over a link of this rate, in units of what hides the copies."""
    wishes = Constraints(MICROBATCHES, (1,) * RANKS, schedule, "pb" if schedule == "1f1b" else None)
    problem = problem_of("gpt_tied", ranks=RANKS, wishes=wishes)
    keeping = propose(problem, "uniform")[0]
    prices, works = keeping.prices, Cutter(problem.graph).works(keeping.cuts)
    saved = max(prices.saved_bytes(s, 1) for s in range(RANKS))
    seconds = keeping.timeline.busy(0) / MICROBATCHES
    hosts = tuple(replace(host, swap=Link(0.0, rate * saved / seconds)) for host in problem.cluster.hosts)
    stages = tuple(
        replace(stage, offload=places_of(problem.graph, work, work.saved))
        for stage, work in zip(keeping.plan.stages, works, strict=True)
    )
    return replace(problem, cluster=replace(problem.cluster, hosts=hosts)), replace(keeping.plan, stages=stages)


def with_beside(plan: Plan, count: int) -> Plan:
    return replace(plan, stages=tuple(replace(stage, beside_copy=count) for stage in plan.stages))


@pytest.mark.parametrize("rate", [8.0, 1.0, 0.3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_plan_says_so_many_that_nobody_waits_for_a_copy_that_goes_as_foreseen(schedule, rate):
    problem, plan = offloading(schedule, rate)
    found, endless = judge(plan, problem), judge(with_beside(plan, 10**6), problem)
    assert all(stage.beside_copy is not None for stage in found.plan.stages)
    assert found.step_s == pytest.approx(endless.step_s, rel=1e-12)
    assert all(a <= b for a, b in zip(found.peak_bytes, endless.peak_bytes, strict=True))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_fewer_hold_no_more_whatever_the_copies_take(schedule):
    """What a rank holds is decided by its list, up to messages, whose times differ."""
    problem, plan = offloading(schedule, 1.0)
    saved: dict[int, list[int]] = {}
    for count in (0, 1, 2, 4, 100):
        kept = {
            tuple(curve.peak_bytes for curve in judged_at(problem, plan, count, part).curves) for part in (1.0, 0.2)
        }
        assert len(kept) == 1, "the same for a link of a fifth of the rate"
        saved[count] = [*kept.pop()]
    for fewer, more in zip([*saved.values()], [*saved.values()][1:], strict=False):
        assert all(a <= b for a, b in zip(fewer, more, strict=True))
    assert saved[0] < saved[100]


def judged_at(problem: Problem, plan: Plan, count: int, part: float) -> Judged:
    (host,) = problem.cluster.hosts
    slower = replace(host, swap=Link(0.0, host.swap.bytes_per_s * part))
    slow = replace(problem, cluster=replace(problem.cluster, hosts=(slower,)))
    return judge(with_beside(plan, count), slow)


def test_what_a_plan_says_is_followed():
    problem, plan = offloading("gpipe", 8.0)
    judged = Judge(problem).judge(with_beside(plan, 0))
    assert [stage.beside_copy for stage in judged.plan.stages] == [0] * RANKS
    for line in judged.program.ranks:
        names = [str(x) for x in line if isinstance(x, AnyCompute | OwnWork)]
        for x in line:
            if isinstance(x, Vacate):
                assert names.index(str(x)) == names.index(f"{x.stage}EVICT{x.microbatch}") + 1
