"""Laws of copies to the host beside computes: as foreseen nobody waits, and fewer computes hold no more."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from lightning_pipe.core.cluster import Link
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.program import AnyCompute, Compute, Evict, Fetch, Instruction, OwnWork, Vacate
from lightning_pipe.cost.stage import Cutter
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.evaluation.copies import tighter
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged, judge
from lightning_pipe.planner.evaluation.resolve import places_of
from lightning_pipe.planner.memory import fit_memory
from lightning_pipe.planner.memory.fit_memory import fit_by_policies
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.report.account import step_seconds
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator.simulate import simulate
from parity.training import problem_of

MICROBATCHES = 8


def offloading(schedule: str, rate: float, *, ranks: int = 2) -> tuple[Problem, Plan]:
    """Return a plan whose stages offload all they save over a link of this rate, in units of what hides the copies."""
    constraints = Constraints(MICROBATCHES, (1,) * ranks, schedule, "pb" if schedule == "1f1b" else None)
    problem = problem_of("gpt_tied", ranks=ranks, constraints=constraints)
    keeping = propose(problem, "uniform")[0]
    prices, works = keeping.prices, Cutter(problem.graph).works(keeping.cuts)
    saved = max(prices.saved_bytes(s, 1) for s in range(ranks))
    seconds = keeping.timeline.busy(0) / MICROBATCHES
    hosts = tuple(replace(host, swap=Link(0.0, rate * saved / seconds)) for host in problem.cluster.hosts)
    stages = tuple(
        replace(stage, offload=places_of(problem.graph, work, work.saved))
        for stage, work in zip(keeping.plan.stages, works, strict=True)
    )
    return replace(problem, cluster=replace(problem.cluster, hosts=hosts)), replace(keeping.plan, stages=stages)


def with_beside(plan: Plan, count: int) -> Plan:
    return replace(plan, stages=tuple(replace(stage, beside_copy=count) for stage in plan.stages))


@pytest.mark.parametrize(("schedule", "rate"), [("gpipe", 8.0), ("gpipe", 1.0), ("gpipe", 0.5), ("1f1b", 8.0)])
def test_a_plan_says_so_many_that_nobody_waits_for_a_copy_that_goes_as_foreseen(schedule, rate):
    problem, plan = offloading(schedule, rate, ranks=4)
    found = judge(plan, problem)
    assert all(stage.beside_copy is not None for stage in found.plan.stages)
    assert any(isinstance(x, Vacate) for line in found.program.ranks for x in line)
    endless = simulate(verify(replace(found.program, ranks=tuple(map(late, found.program.ranks)))), found.prices)
    assert step_seconds(found.timeline) == pytest.approx(step_seconds(endless), rel=1e-12)


def late(line: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
    """Return the line of a rank that gives memory up as late as it can."""
    vacates = {(x.stage, x.microbatch): x for x in line if isinstance(x, Vacate)}
    moved: list[Instruction] = []
    for x in line:
        if isinstance(x, Compute) and x.direction == "B" and (vacate := vacates.pop((x.stage, x.microbatch), None)):
            moved.append(vacate)
        if not isinstance(x, Vacate):
            moved.append(x)
    return tuple(moved)


@pytest.mark.parametrize("count", [0, 2, 5, 10**6])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_would_be_fetched_before_it_has_gone_is_kept(schedule, count):
    """So offloading holds no more than keeping all does, and less where anything leaves."""
    problem, plan = offloading(schedule, 1.0, ranks=4)
    found = judge(with_beside(plan, count), problem)
    keeping = judge(replace(plan, stages=tuple(replace(stage, offload=()) for stage in plan.stages)), problem)
    leaving = [{(x.stage, x.microbatch) for x in line if isinstance(x, Evict)} for line in found.program.ranks]
    for line, curve, kept, left in zip(found.program.ranks, found.curves, keeping.curves, leaving, strict=True):
        for work in left:
            away = line[line.index(Vacate(*work)) : line.index(Fetch(*work))]
            assert any(isinstance(x, AnyCompute) for x in away)
        assert curve.peak_bytes < kept.peak_bytes if len(left) == MICROBATCHES else curve.peak_bytes <= kept.peak_bytes
    assert bool(leaving[0]) == (count < MICROBATCHES)
    assert not leaving[-1] or schedule == "gpipe"


def test_an_order_with_copies_of_a_stage_that_offloads_nothing_is_refused():
    problem, plan = offloading("1f1b", 1.0)
    order = tuple(" ".join(f"{s}F{m} {s}VACATE{m} {s}FETCH{m} {s}B{m}" for m in range(MICROBATCHES)) for s in range(2))
    copying = replace(plan, order=order)
    assert any(isinstance(x, Vacate) for line in judge(copying, problem).program.ranks for x in line)
    first, second = copying.stages
    with pytest.raises(PlanError, match="has copies to the host of stage 1, which offloads nothing"):
        judge(replace(copying, stages=(first, replace(second, offload=()))), problem)


def test_fewer_hold_no_more_whatever_the_copies_take():
    """What a rank holds is decided by its list, up to messages, whose times differ."""
    problem, plan = offloading("gpipe", 1.0)
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
    assert [stage.beside_copy for stage in judged.plan.stages] == [0] * 2
    for line in judged.program.ranks:
        names = [str(x) for x in line if isinstance(x, AnyCompute | OwnWork)]
        for x in line:
            if isinstance(x, Vacate):
                assert names.index(str(x)) == names.index(f"{x.stage}EVICT{x.microbatch}") + 1


def test_waiting_sooner_for_copies_holds_less_and_takes_longer():
    problem, plan = offloading("gpipe", 0.2)
    free = judge(plan, problem)
    tried = [judge(one, problem) for one in tighter(free.plan)]
    assert [[stage.beside_copy for stage in one.plan.stages] for one in tried][-1] == [0] * 2
    assert tried[-1].peak_bytes < free.peak_bytes and tried[-1].step_s > free.step_s
    assert all(a.peak_bytes >= b.peak_bytes for a, b in itertools.pairwise(tried))


def test_saved_tensors_are_given_up_by_waiting_sooner_where_giving_up_more_does_not_do(monkeypatch):
    problem, plan = offloading("gpipe", 0.2)
    (host,) = problem.cluster.hosts
    keeping = judge(replace(plan, stages=tuple(replace(stage, offload=()) for stage in plan.stages)), problem)
    devices = tuple(replace(device, memory_bytes=min(keeping.peak_bytes) // 2) for device in host.devices)
    constraints = replace(problem.constraints, memory_policies=frozenset(("offload",)))
    tight = replace(
        problem, cluster=replace(problem.cluster, hosts=(replace(host, devices=devices),)), constraints=constraints
    )
    found = fit_by_policies(tight, judge(keeping.plan, tight), judge=Judge(tight))
    monkeypatch.setattr(fit_memory, "tighter", lambda plan: ())
    without = fit_by_policies(tight, judge(keeping.plan, tight), judge=Judge(tight))
    assert without.overflow(tight.cluster) > 0, "the memory asks for more than was found"
    assert found.overflow(tight.cluster) < without.overflow(tight.cluster)
