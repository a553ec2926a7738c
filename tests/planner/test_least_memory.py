"""What does not fit is said without a search, and nothing is said not to fit that does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planners.exhaustive import Size
from benchmarks.planners.rivals import any_problem, verdict
from lightning_pipe.errors import PlanError
from lightning_pipe.planner import registry
from lightning_pipe.planner.memory.least_memory import LeastMemory
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.registry import propose
from planner.test_uniform import cluster, layers


def chain(memory: int, *, devices: int = 4, parameters: int = 2_000_000) -> Problem:
    graph, profile = layers([1.0] * 12, [1e4] * 12)
    graph = replace(graph, parameter_bytes=dict.fromkeys(graph.parameter_bytes, parameters))
    return Problem(graph, profile, cluster(devices, memory=memory), 16)


def test_where_all_devices_are_too_small_no_search_is_made(monkeypatch: pytest.MonkeyPatch):
    """It took ten seconds to say so."""

    def searched(*_: object) -> None:
        raise AssertionError("a search")

    monkeypatch.setattr(registry, "auto", searched)
    monkeypatch.setattr(registry, "judged_drafts", searched)
    with pytest.raises(PlanError, match=r"No plan fits into memory. The nearest.* 4 stages .*too little"):
        propose(chain(6_000_000), "auto")


def test_where_no_row_of_stages_fits_only_drafts_are_looked_at(monkeypatch: pytest.MonkeyPatch):
    """Twelve equal layers on five devices: three of them at least are on one device, which has room for less."""
    problem = chain(11_500_000, devices=5)
    least = LeastMemory(problem)
    assert least.may_fit() and not least.row_may_fit()
    monkeypatch.setattr(registry, "auto", lambda *_: pytest.fail("searched for rows"))
    with pytest.raises(PlanError, match="No plan fits into memory"):
        propose(problem, "auto")


@pytest.mark.parametrize("seed", range(12))
def test_what_fits_is_never_said_not_to(seed: int):
    """The memory of a plan that some planner finds, to the byte, is enough by the bounds too."""
    problem = any_problem(seed, Size(6, 3, 0.3))
    roomy = replace(problem, cluster=cluster(problem.cluster.ranks))
    for planner in ("uniform", "dawnpiper"):
        try:
            found = propose(roomy, planner)
        except PlanError:
            continue  # too few layers
        for one in found:
            tight = replace(roomy, cluster=cluster(problem.cluster.ranks, memory=max(one.peak_bytes)))
            least = LeastMemory(tight)
            assert least.may_fit() and least.row_may_fit(), (planner, one.plan)


@pytest.mark.parametrize("seed", range(5))
def test_no_planner_is_ahead_of_auto_or_over_the_memory(seed: int):
    found = verdict(seed, Size(6, 3, 0.3))
    assert found.is_right, found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_planner_is_ahead_of_auto_in_larger_problems(seed: int):
    found = verdict(seed)
    assert found.is_right, found
