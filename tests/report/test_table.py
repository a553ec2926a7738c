"""Laws of tables: what they say is what plan, graph and timeline hold."""

from __future__ import annotations

import re

import pytest

from lightning_pipe.core.graph import Graph, Node
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.program import Compute, Step
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.errors import PlanError
from lightning_pipe.report import plan_table, timeline_table


def node(name: str, module: str, parameters: tuple[str, ...], flops: int) -> Node:
    return Node(name, "op", module, "", (), parameters, 0, flops, 2 * flops, 100)


GRAPH = Graph(
    nodes=(
        node("embed", "model.embed", ("wte",), 10),
        node("mm", "model.blocks.0", ("w0",), 40),
        node("mm_1", "model.blocks.1", ("w1",), 40),
        node("head", "model.head", ("wte",), 10),
    ),
    samples=10,
    parameter_bytes={"wte": 2**20, "w0": 2**30, "w1": 2**30},
    fingerprint="f",
)
PLAN = Plan((StagePlan("", (0, 1)), StagePlan("model.blocks.1", (2,))), 2, options={"warmup": "pb"})


def rows(table: str) -> list[list[str]]:
    """Return the cells of every line that begins with a number."""
    return [re.split(r"\s{2,}", line.strip()) for line in table.splitlines() if re.match(r"\s*\d+\s", line)]


def test_a_plan_is_shown_stage_by_stage():
    table = plan_table(PLAN, GRAPH)
    assert table.splitlines()[0] == "1f1b, warmup pb: 10 samples in 2 micro-batches"
    assert rows(table) == [
        ["0", "0,1", "model.embed … model.blocks.0", "1 GiB", "50.0%", "2 + 3"],
        ["1", "2", "model.blocks.1 … model.head", "1 GiB", "50.0%", "5"],
    ]


def test_measured_seconds_replace_counted_operations():
    costs = [row[4] for row in rows(plan_table(PLAN, GRAPH, seconds=[0.1, 0.1, 0.5, 0.3]))]
    assert costs == ["20.0%", "80.0%"]


def test_bytes_stand_in_where_no_operations_are_counted():
    nodes = tuple(node(n.name, n.module, n.parameters, 0) for n in GRAPH.nodes)
    plan = Plan((StagePlan("", (0,)), StagePlan("head", (1,))), 1)
    costs = [row[4] for row in rows(plan_table(plan, Graph(nodes, 10, GRAPH.parameter_bytes, "f")))]
    assert costs == ["75.0%", "25.0%"]


def test_replicas_with_weights_take_unequal_parts():
    plan = Plan((StagePlan("", (0, 1), weights=(3, 1)),), 1)
    assert rows(plan_table(plan, GRAPH))[0][-1] == "7 + 3"


def test_what_is_not_kept_is_counted_where_there_is_any():
    dropping = StagePlan("model.blocks.1", (1,), recompute=("model.blocks.1", "gelu"), offload=("mm_1",))
    table = plan_table(Plan((StagePlan("", (0,)), dropping), 1), GRAPH)
    assert [row[-1] for row in rows(table)] == ["-", "recompute 2, offload 1"]
    assert "not kept" not in plan_table(PLAN, GRAPH)


def test_stages_that_compute_w_one_by_one_are_named_where_w_is_to_be_joined():
    plan = Plan((StagePlan("", (0,)), StagePlan("model.blocks.1", (1,))), 4, "2bp", {"join": 4})
    first, second = plan_table(plan, GRAPH, joinable=(1,)).splitlines()[-2:]
    assert first.endswith("one by one")
    assert second.endswith("joined")
    assert "one by one" not in plan_table(plan, GRAPH)


def test_replicas_in_turn_take_whole_microbatches():
    plan = Plan((StagePlan("", (0, 1), "microbatches"),), 4)
    assert rows(plan_table(plan, GRAPH))[0][-1] == "3 (round-robin)"


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((StagePlan("", (0,)), StagePlan("model.neck", (1,))), "stage 1 begins at 'model.neck'; the graph has no such"),
        ((StagePlan("", (0,)), StagePlan("embed", (1,))), "stage 1 begins at 'embed', which is not behind"),
    ],
)
def test_a_plan_that_does_not_fit_the_graph_is_refused(stages, message):
    with pytest.raises(PlanError, match=message):
        plan_table(Plan(stages, 1), GRAPH)


def test_time_of_each_rank_adds_up():
    timeline = Timeline(
        (
            Event(0, Compute(0, "F", 0), 0.0, 1.0),
            Event(0, Compute(0, "I", 0), 6.0, 8.0),
            Event(0, Compute(0, "W", 0), 8.0, 10.0),
            Event(0, Step(), 10.0, 12.0),
            Event(1, Compute(1, "F", 0), 2.0, 3.0),
            Event(1, Compute(1, "I", 0), 3.0, 5.0),
        )
    )
    table = timeline_table(timeline)
    assert table.splitlines()[0] == "makespan 12 s"
    assert rows(table) == [
        ["0", "1 s", "2 s", "2 s", "5 s", "50.0%", "7 s"],
        ["1", "1 s", "2 s", "0 ns", "0 ns", "0.0%", "9 s"],
    ]
