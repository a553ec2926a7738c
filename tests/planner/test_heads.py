"""Laws of plans of steps that need all samples at once: all forwards first, priced with what is put together."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lightning_pipe.core.graph import HeadWork
from lightning_pipe.core.milestones import Head
from lightning_pipe.core.program import AnyCompute
from lightning_pipe.cost.counted import head_s
from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.planner.evaluation.evaluate import judge
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import PLANNERS, propose
from lightning_pipe.report import plan_table
from lightning_pipe.schedule import SCHEDULES, order_of
from lightning_pipe.schedule.rules import is_forwards_first
from planner.test_drafts import joining
from planner.test_uniform import cluster, layers

HEAD = HeadWork("train.py:41 in training_step", "aten.logsumexp.default", 16.0, 4, samples=16, flops=10**9)
SECONDS = [1.0] * 8


def problem(ranks: int, constraints: Constraints, head: HeadWork | None = HEAD) -> Problem:
    graph, profile = layers(SECONDS, [8.0] * len(SECONDS), samples=16)
    return Problem(replace(graph, head=head), profile, cluster(ranks), 16, constraints=constraints)


def has_forwards_first(judged) -> bool:
    """Return whether all ranks run forwards, HEAD on the ranks of the last stage, then backwards."""
    lines = [[x for x in line if isinstance(x, (AnyCompute, Head))] for line in judged.program.ranks]
    words = ["".join("H" if x == Head() else x.kind for x in line) for line in lines]
    return any("H" in word for word in words) and all(re.fullmatch("F*H?[BIW]*", word) for word in words)


@pytest.mark.parametrize("planner", ["auto", "exhaustive", *PLANNERS])
def test_every_planner_runs_all_forwards_first(planner):
    found = propose(problem(2, Constraints(4)), planner)
    assert all(map(has_forwards_first, found))


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "milp"])
def test_a_schedule_that_mixes_forwards_and_backwards_is_refused_in_words(schedule):
    """Whether it does is asked of its order: one micro-batch, for one, is never mixed."""
    asked = problem(2, Constraints(4, schedule=schedule))
    if schedule in ("gpipe", "breadth_first", "2bp"):
        assert has_forwards_first(propose(asked, "uniform")[0])
        return
    with pytest.raises(ConfigError) as refused:
        propose(asked, "uniform")
    assert str(refused.value) == (
        "Gradients need all samples of a batch at once (aten.logsumexp.default at train.py:41 in training_step): "
        "the last stage puts 260 B together. So all forwards come before the backwards, but found "
        f"schedule={schedule!r}, which mixes them. Use schedule='gpipe', or 'breadth_first' for several stages per "
        "device; or whole_batch='by_microbatch', which takes gradients as accumulation does."
    )


def test_weight_halves_are_joined_behind_the_head_where_that_saves_time():
    asked = joining(2, each_s=5.0)
    found = propose(replace(asked, graph=replace(asked.graph, head=HEAD)), "uniform")[0]
    assert found.plan.options == {"base": "gpipe", "join": 8} and has_forwards_first(found)


def test_which_orders_have_all_forwards_first():
    layout = {name: SCHEDULES[name].layout([(0,), (1,)]) for name in ("gpipe", "1f1b", "breadth_first", "zb_h1")}
    many = {name: is_forwards_first(order_of(name, layout=layout[name], microbatches=4)) for name in layout}
    assert many == {"gpipe": True, "1f1b": False, "breadth_first": True, "zb_h1": False}
    assert all(is_forwards_first(order_of(name, layout=layout[name], microbatches=1)) for name in layout)


def test_a_warm_up_of_1f1b_and_weight_versions_are_refused():
    with pytest.raises(ConfigError, match="found schedule='1f1b', which mixes them"):
        propose(problem(2, Constraints(4, warmup="pa")), "auto")
    with pytest.raises(PlanError, match=r"versions='2bw' runs forwards of the next batch .* whole_batch='by_micro"):
        propose(problem(2, Constraints(4, versions="2bw")), "auto")


def test_a_plan_of_the_user_is_refused_too():
    plan = propose(problem(2, Constraints(4, schedule="1f1b"), head=None), "uniform")[0].plan
    with pytest.raises(ConfigError, match="found schedule='1f1b', which mixes them"):
        judge(plan, problem(2, Constraints()))


def test_a_head_that_only_makes_results_keeps_schedules_and_is_in_their_programs():
    speaking = replace(HEAD, holds_backwards=False)
    found = propose(problem(2, Constraints(4, schedule="1f1b"), head=speaking), "uniform")[0]
    assert not has_forwards_first(found) and Head() in found.program.ranks[1]
    assert plan_table(found.plan, replace(found_graph(speaking), samples=16)).count("Results need all samples") == 1


def found_graph(head: HeadWork):
    return problem(2, Constraints(), head).graph


def test_the_head_takes_time_and_memory():
    """Its seconds are on the longest path, between all forwards and all backwards; what it takes is held meanwhile."""
    with_head, without = (judge(plan_of(head), problem(2, Constraints(), head)) for head in (HEAD, None))
    seconds = head_s(found_graph(HEAD), with_head.prices._profile, 16)
    assert seconds > 0
    assert with_head.step_s == pytest.approx(without.step_s + seconds)
    last = with_head.curves[1].peak_total_bytes - without.curves[1].peak_total_bytes
    assert last >= HEAD.size(16)
    assert with_head.curves[0].peak_total_bytes == without.curves[0].peak_total_bytes
    alone = propose(problem(1, Constraints(4)), "uniform")[0]
    for judged in (with_head, alone):
        assert plan_table(judged.plan, found_graph(HEAD)).count("train.py:41 in training_step") == 1


def plan_of(head: HeadWork | None):
    return propose(problem(2, Constraints(4, schedule="gpipe"), head), "uniform")[0].plan


def test_replicas_of_the_last_stage_come_to_it_together():
    judged = propose(problem(4, Constraints(4, replicas=(2, 2))), "uniform")[0]
    heads = {e.rank: (e.start, e.end) for e in judged.timeline.events if e.instruction == Head()}
    assert len({*heads.values()}) == 1 and len(heads) >= 1
