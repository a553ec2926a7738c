"""Under a limit, plans are nearly as quick as the best of all cuts, warm-ups and choices of what to recompute."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.cost.activations import candidates
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.evaluation.resolve import places_of
from lightning_pipe.planner.memory.settle import fitted
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.planner.systems.uniform import uniform
from lightning_pipe.profiles.published import load_published

MICROBATCHES, LINK = 4, Link(5e-6, 25e9)
CHAINS = {  # milliseconds of forward and backward, MB of activations, 100 kB of parameters; and the memory
    "a stage that fits has to help": (
        [(2, 10, 8, 1), (5, 11, 8, 5), (4, 4, 9, 8), (7, 5, 4, 6), (2, 10, 3, 6), (8, 10, 5, 5)],
        50_871_886,
    ),
    "more warm-up is worth more recomputing": (
        [(3, 13, 9, 4), (6, 15, 5, 5), (3, 14, 8, 5), (9, 14, 7, 7), (3, 8, 4, 6), (7, 16, 5, 6)],
        55_249_493,
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_plan_under_a_limit_is_nearly_the_best_of_everything(name, tmp_path):
    layers, memory = CHAINS[name]
    problem = problem_of(layers, memory, tmp_path / "chain-pbs-4.txt")
    best = min(everything(problem), key=lambda one: one.rank(problem.cluster))
    found = propose(problem, "auto")[0]
    assert best.overflow(problem.cluster) <= 0 and found.overflow(problem.cluster) <= 0
    assert found.step_s <= 1.03 * best.step_s


def problem_of(layers, memory, path) -> Problem:
    keys = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
    lines = [
        f"node{k} -- Layer -- "
        + ", ".join(f"{key}={value * unit}" for key, value, unit in zip(keys, layer, (1, 1, 10**6, 10**5), strict=True))
        for k, layer in enumerate(layers)
    ]
    links = [f"\tnode{k} -- node{k + 1}" for k in range(len(layers) - 1)]
    path.write_text("\n".join([*lines, *links]) + "\n", encoding="utf-8")
    graph, profile = load_published(path, optimizer_state=2.0)
    host = Host("h", (Device("x", memory),) * 2, inside=LINK, network=LINK)
    constraints = Constraints(MICROBATCHES, (1, 1), "1f1b", memory_policies=frozenset(("recompute",)))
    return Problem(graph, profile, Cluster((host,)), 4 * MICROBATCHES, constraints=constraints)


def everything(problem: Problem) -> Iterator[Judged]:
    """Yield every plan of two stages: each cut, each warm-up, each choice of what both recompute."""
    judge, graph = Judge(problem), problem.graph
    for cut, depth in itertools.product(range(1, len(graph.nodes)), range(1, MICROBATCHES + 1)):
        stages = (StagePlan("", (0,)), StagePlan(graph.nodes[cut].name, (1,)))
        works = judge.pricer.works((cut,))
        can = [[c.memory for c in candidates(graph, work) if c.is_remakeable] for work in works]
        choices = [
            [places_of(graph, work, one) for n in range(len(own) + 1) for one in itertools.combinations(own, n)]
            for work, own in zip(works, can, strict=True)
        ]
        for given_up in itertools.product(*choices):
            parts = zip(stages, given_up, strict=True)
            recomputing = tuple(replace(stage, recompute=places) for stage, places in parts)
            yield judge.judge(Plan(recomputing, MICROBATCHES, "1f1b", {"warmup": f"{depth},1"}))


def test_an_outline_that_is_slower_than_a_plan_that_fits_is_judged_once(tmp_path):
    """Outlines that did not fit were judged again with less warm-up and other policies, though they could not win."""
    layers, memory = CHAINS["a stage that fits has to help"]
    roomy, tight = (problem_of(layers, limit, tmp_path / "chain-pbs-4.txt") for limit in (1 << 40, memory // 2))
    outline, times = uniform(roomy)[0], list[float]()

    class Counting(Judge):
        def judge(self, *arguments, **options) -> Judged:
            judged = super().judge(*arguments, **options)
            times.append(judged.step_s)
            return judged

    fitted(tight, outline, judge=Counting(tight))
    tries, alone_s = len(times), times[0]
    assert tries > 1 and min(times) >= alone_s * 0.999, "to need less memory takes time"
    fitted(tight, outline, judge=Counting(tight), best_s=0.9 * alone_s)
    assert len(times) == tries + 1
