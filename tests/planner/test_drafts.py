"""Laws of drafts: every schedule makes plans on a row of devices, judged like all others; what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipe.core.cluster import Link
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.program import Compute, Joined, Layout
from lightning_pipe.core.serial import from_yaml, to_yaml
from lightning_pipe.errors import ConfigError, PlanError, ProgramError
from lightning_pipe.planner.evaluation.evaluate import judge
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.schedule import SCHEDULES, TimedSchedule, order_of
from lightning_pipe.schedule.construct.layout_shapes import looping
from lightning_pipe.schedule.formats.text import format_order
from lightning_pipe.schedule.registry import planned_order, register_schedule
from planner.test_uniform import cluster, layers

SECONDS = [1.0] * 16


def problem(ranks: int, constraints: Constraints, *, samples: int = 16, seconds: list[float] = SECONDS) -> Problem:
    graph, profile = layers(seconds, [8.0] * len(seconds), samples=samples)
    return Problem(graph, profile, cluster(ranks), samples, constraints=constraints)


@pytest.mark.sampled
@pytest.mark.parametrize("planner", ["uniform", "dapple"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_makes_a_plan_that_can_be_written_and_read(schedule, planner):
    asked = problem(4, Constraints(8, schedule=schedule))
    found = propose(asked, planner)[0]
    assert found.plan.schedule == schedule
    assert bool(found.plan.order) == isinstance(SCHEDULES[schedule], TimedSchedule)
    again = from_yaml(Plan, to_yaml(found.plan))
    assert again == found.plan
    assert judge(again, asked).step_s == found.step_s


def test_chunks_are_those_that_are_wished():
    for chunks in (1, 2, 4):
        found = propose(problem(4, Constraints(8, schedule="interleaved", stages_per_device=chunks)), "uniform")[0]
        assert len(found.plan.stages) == 4 * chunks


def joining(ranks: int, *, each_s: float, schedule: str | None = "2bp") -> Problem:
    """Return a problem whose W can be joined, with `each_s` more seconds for every operation, whatever its samples."""
    asked = problem(ranks, Constraints(8, schedule=schedule), samples=8)
    operations = tuple(replace(operation, joinable=True) for operation in asked.graph.operations)
    tensors = tuple(replace(tensor, joinable=True) for tensor in asked.graph.tensors)
    seconds = tuple(tuple(each_s + time for time in times) for times in asked.profile.seconds)
    graph = replace(asked.graph, operations=operations, tensors=tensors)
    return replace(asked, graph=graph, profile=replace(asked.profile, seconds=seconds))


def test_w_are_joined_where_that_saves_time():
    best, *others = propose(joining(4, each_s=1.0), "uniform")
    assert best.plan.options == {"join": 8}
    assert any(isinstance(x, Joined) for line in best.program.ranks for x in line)
    single = judge(replace(best.plan, options={}), joining(4, each_s=1.0))
    assert best.step_s < single.step_s
    assert any(other.plan.options == {} for other in others)


def test_w_that_take_as_long_joined_stay_apart():
    assert {one.plan.schedule: one.plan.options for one in propose(joining(4, each_s=0.0), "uniform")} == {"2bp": {}}


def test_auto_is_at_least_as_good_as_every_schedule_on_its_own():
    """Few micro-batches, and sums of gradients that take longer than messages: 1F1B's bubble is large."""

    def asked(**constraints) -> Problem:
        made = problem(4, Constraints(4, **constraints))
        return replace(made, cluster=cluster(4, link=Link(latency_s=0.0, bytes_per_s=100.0)))

    best = propose(asked(), "auto")[0]
    for name in SCHEDULES:
        one = propose(asked(schedule=name), "uniform")[0]
        assert best.step_s <= one.step_s * (1 + 1e-9), name
    assert best.plan.schedule not in ("1f1b", "gpipe")


def test_a_wished_layout_keeps_its_stages():
    found = propose(problem(3, Constraints(4, (2, 1))), "auto")[0]
    assert [stage.ranks for stage in found.plan.stages] == [(0, 1), (2,)]


def test_a_given_order_decides_layout_and_micro_batches():
    order = order_of("breadth_first", layout=looping([(0,), (1,)], 2), microbatches=4)
    found = propose(problem(2, Constraints(order=format_order(order))), "auto")[0]
    assert found.plan.layout == looping([(0,), (1,)], 2)
    assert (found.plan.microbatches, found.plan.schedule) == (4, "given")
    assert planned_order(found.plan, microbatches=4) == order


def test_fewer_micro_batches_leave_out_the_computes_of_the_others():
    order = order_of("1f1b", layout=Layout(((0,), (1,))), microbatches=5)
    plan = Plan((), 5, order=format_order(order))
    assert planned_order(plan, microbatches=2)[1] == tuple(Compute(1, kind, m) for m in range(2) for kind in "FB")
    with pytest.raises(PlanError, match="order is of 5 micro-batches; expected at least 6"):
        planned_order(plan, microbatches=6)


@pytest.mark.parametrize(
    ("ranks", "constraints", "error", "message"),
    [
        (
            2,
            Constraints(order=("0F0 0B0 0F1 0B1", "1B0 1F0 1F1 1B1")),
            ProgramError,
            'law "inputs": it needs 1F0 before',
        ),
        (3, Constraints(order=("0F0 0B0", "1F0 1B0")), PlanError, "order is of 2 ranks, the trainer has 3"),
        (2, Constraints(4, order=("0F0 0B0", "1F0 1B0")), PlanError, "of 1 micro-batches, but microbatches=4 is set"),
        (4, Constraints(8, (2, 2), "chimera"), ConfigError, "even number of devices of one rank each"),
        (3, Constraints(8, schedule="dualpipe"), ConfigError, "even number of devices"),
        (
            4,
            Constraints(8, schedule="interleaved", stages_per_device=5),
            PlanError,
            "16 operations and can be cut at 15 places between them, too few for 20 stages",
        ),
    ],
)
def test_what_cannot_be_is_refused(ranks, constraints, error, message):
    with pytest.raises(error, match=message):
        propose(problem(ranks, constraints), "uniform")


def test_a_schedule_of_your_own_is_known_by_its_name():
    def last_first(layout, microbatches, options=None):
        """All forwards, then all backwards, the last micro-batch first."""
        lines = [
            [Compute(s, "F", m) for m in range(microbatches)]
            + [Compute(s, "B", m) for m in reversed(range(microbatches))]
            for s in range(len(layout.stages))
        ]
        return tuple(tuple(lines[stages[0]]) for stages in ([0], [1]))

    try:
        with pytest.warns(FutureWarning, match="chunks is called stages_per_device now"):
            register_schedule("last_first", last_first, chunks=(2, 1))
        assert SCHEDULES.pop("last_first").stages_per_device == (2, 1)
        register_schedule("last_first", last_first)
        found = propose(problem(2, Constraints(4, schedule="last_first")), "uniform")[0]
        assert found.plan.schedule == "last_first"
        with pytest.raises(ConfigError, match="exists already"):
            register_schedule("last_first", last_first)
    finally:
        del SCHEDULES["last_first"]
    with pytest.raises(ConfigError, match=r"did you mean 'zigzag'\? Expected one of looping, zigzag, both ways"):
        register_schedule("another", last_first, shape="zigzig")
    with pytest.raises(ConfigError, match="expected one or more numbers from 1"):
        register_schedule("another", last_first, stages_per_device=(0,))
    with pytest.raises(ConfigError, match="old name of stages_per_device"):
        register_schedule("another", last_first, stages_per_device=(2,), chunks=(2,))


def test_drafts_keep_to_memory_where_outlines_do():
    asked = problem(4, Constraints(8, schedule="breadth_first"))
    with pytest.raises(PlanError, match="No plan fits into memory"):
        propose(replace(asked, cluster=cluster(4, memory=1)), "uniform")


def test_few_groups_of_replicas_represent_all_under_any_schedule():
    """Folding leaves gaps in the numbers of ranks."""
    asked = problem(32, Constraints(96, (16, 16), "zb_h1"), samples=96 * 16)
    folded = propose(asked, "uniform")[0]
    assert len(set(folded.representatives)) < 32
    assert judge(folded.plan, asked).step_s == pytest.approx(folded.step_s)


def test_a_schedule_gets_no_cut_that_is_worse_than_that_of_1f1b():
    """Where messages cost much at some cuts: the balanced one has the largest, which 1F1B's plan avoids."""
    seconds, sizes = [3.0, 3.0, 3.0, 1.0, 3.0, 3.0], [8.0, 8.0, 4000.0, 8.0, 8.0, 8.0]
    graph, profile = layers(seconds, sizes, samples=16)
    slow = cluster(2, link=Link(latency_s=0.0, bytes_per_s=100.0))
    asked = Problem(graph, profile, slow, 16, constraints=Constraints(8, (1, 1), schedule="1f1b"))
    outline = propose(asked, "uniform")[0]
    for name in ("zb_h1", "zb_h2", "2bp"):
        found = propose(replace(asked, constraints=replace(asked.constraints, schedule=name)), "uniform")[0]
        same_cuts = judge(replace(outline.plan, schedule=name, options={}), asked)
        assert found.step_s <= same_cuts.step_s * (1 + 1e-9), name
