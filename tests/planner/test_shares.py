"""Weights of replicas fit the replicas, or are refused with the way out."""

from __future__ import annotations

import pytest

from lightning_pipe.core.graph import Graph, Node
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.evaluation.resolve import resolve

NODES = tuple(Node(f"h_{k}", "op", f"layer.{k}", "", (), (), 0, 0, 0, 0) for k in range(2))
GRAPH = Graph(NODES, samples=8, parameter_bytes={}, fingerprint="f")


def plan_of(*first: object) -> Plan:
    return Plan((StagePlan("", (0, 1), *first), StagePlan("h_1", (2,))), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (("samples", (3,)), r"Stage 0 has weights: \[3\] for ranks \[0, 1\]; expected as many whole numbers from 1"),
        (
            ("samples", (3, 1, 1)),
            r"Stage 0 has weights: \[3, 1, 1\] for ranks \[0, 1\].* Write one weight for each rank",
        ),
        (("samples", (3, 0)), r"Stage 0 has weights: \[3, 0\].* expected as many whole numbers from 1"),
        (("microbatches", (3, 1)), r"Stage 0 has weights: \[3, 1\], but `share: microbatches`.* Remove the weights"),
    ],
)
def test_weights_that_do_not_fit_are_refused(first, message):
    with pytest.raises(PlanError, match=message):
        resolve(plan_of(*first), GRAPH, ranks=3)


def test_weights_that_fit_share_the_samples():
    plan = plan_of("samples", (3, 1))
    assert resolve(plan, GRAPH, ranks=3) == (1,)
    assert [len(plan.layout.samples(0, replica, 0, 8)) for replica in range(2)] == [6, 2]
