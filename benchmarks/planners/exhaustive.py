"""Planner `auto` against the best plan of all: random small problems, solved by both.

    python -m benchmarks.planners exhaustive --problems 500

Two to eight layers in a chain, in some problems with skips; one to five devices of unequal speed on one or two hosts;
links of every pair drawn at random; memory from too little to plenty. The best of all 1F1B pipelines is found by trying
them (`planner.portfolio.exhaustive`), so `auto` is asked for 1F1B too.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_pipe.core.cluster import Cluster, Device, Host, Link, PairLink
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.profile import Profile
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.evaluation.evaluate import Judged, judge
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.profiles.published_graph import graph_of, profile_of
from lightning_pipe.profiles.published_layers import Layer, LayerOutput, Layers
from lightning_pipe.units import format_seconds

SAMPLES = 8
SAME = 1e-6  # relative difference up to which two times are one
ASKED_OPTIMAL, ASKED_WORST = 0.95, 1.03


class Size(NamedTuple):
    """Most layers and devices of a problem, and how many of its layers are read by a later one too."""

    layers: int = 8
    devices: int = 5
    skips: float = 0.15


def random_problem(seed: int, size: Size = Size()) -> Problem:  # noqa: B008 - immutable
    """Return a small problem; the same for the same seed."""
    draw = random.Random(seed)
    graph, profile = _model(draw, draw.randint(2, size.layers), size.skips)
    devices = [
        Device("x", 1 << 40, draw.choice((1.0, 1.0, 1.0, 0.5, 2.0))) for _ in range(draw.randint(1, size.devices))
    ]
    problem = Problem(graph, profile, _cluster(draw, devices), SAMPLES, constraints=Constraints(schedule="1f1b"))
    whole = judge(Candidate((), (tuple(range(len(devices))),), 1, (1,)).plan(problem), problem)
    memory = round(max(whole.peak_bytes) * draw.choice((0.4, 0.6, 0.8, 1.0, 2.0)))
    return replace(problem, cluster=_with_memory(problem.cluster, memory))


def _model(draw: random.Random, count: int, share: float) -> tuple[Graph, Profile]:
    skips = {k: draw.randint(k + 2, count - 1) for k in range(count - 2) if draw.random() < share}
    layers = []
    for k in range(count):
        forward_s = draw.uniform(0.05, 1.0)
        readers = [k + 1] if k + 1 < count else []
        readers += [skips[k]] if k in skips else []
        outputs = (LayerOutput(draw.choice((8.0, 80.0, 800.0)), tuple(readers)),) if readers else ()
        weight = draw.choice((0, 100, 1000, 4000))
        layers.append(
            Layer(f"layer_{k}", "layer", (forward_s,), (draw.uniform(1.0, 2.5) * forward_s,), weight, outputs, 40.0)
        )
    known = Layers(tuple(layers), (SAMPLES,))
    return graph_of(known, fingerprint="random"), profile_of(
        known, fingerprint="random", device="random", optimizer_state=1.0
    )


def _cluster(draw: random.Random, devices: Sequence[Device]) -> Cluster:
    first = draw.randint(1, len(devices))
    link = Link(0.01, 1000.0)
    hosts = [Host(f"h{i}", tuple(own), link, link) for i, own in enumerate((devices[:first], devices[first:])) if own]
    pairs = [(a, b) for a in range(len(devices)) for b in range(len(devices)) if a != b]
    links = tuple(PairLink(a, b, Link(draw.choice((0.0, 0.05)), draw.choice((300.0, 3000.0, 3e4)))) for a, b in pairs)
    return Cluster(tuple(hosts), links if draw.random() < 0.7 else ())


def _with_memory(cluster: Cluster, memory: int) -> Cluster:
    hosts = tuple(
        replace(host, devices=tuple(replace(device, memory_bytes=memory) for device in host.devices))
        for host in cluster.hosts
    )
    return replace(cluster, hosts=hosts)


@dataclass(frozen=True)
class Solved:
    """One problem; a step is None where no plan fits into memory."""

    seed: int
    layers: int
    devices: int
    best_s: float | None
    auto_s: float | None
    seconds: tuple[float, float]
    plans: tuple[str, str]

    @property
    def ratio(self) -> float:
        """Return how much slower the plan of `auto` is; infinite if it finds none where there is one."""
        if self.best_s is None:
            return 1.0
        return self.auto_s / self.best_s if self.auto_s is not None else float("inf")


def solve(seed: int, size: Size = Size()) -> Solved:  # noqa: B008 - immutable
    """Solve one problem by both planners."""
    problem = random_problem(seed, size)
    found, seconds = [], []
    for planner in ("exhaustive", "auto"):
        start = time.process_time()
        found.append(_best(problem, planner))
        seconds.append(time.process_time() - start)
    steps = [judged.step_s if judged is not None else None for judged in found]
    plans = ["no plan" if judged is None else _spelled(judged) for judged in found]
    return Solved(
        seed, len(problem.graph.nodes), problem.cluster.ranks, steps[0], steps[1], (seconds[0], seconds[1]),
        (plans[0], plans[1]),
    )  # fmt: skip


def _best(problem: Problem, planner: str) -> Judged | None:
    try:
        return propose(problem, planner)[0]
    except PlanError:
        return None


def _spelled(judged: Judged) -> str:
    stages = "-".join(",".join(map(str, stage.ranks)) for stage in judged.plan.stages)
    return f"{stages} at {list(judged.cuts)}, {judged.plan.microbatches} micro-batches, {judged.plan.options['warmup']}"


def main(arguments: Sequence[str]) -> int:
    """Print every problem that `auto` does not solve to the best, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args(arguments)
    seeds = range(asked.first, asked.first + asked.problems)
    solved = []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for one in pool.map(solve, seeds):
            solved.append(one)
            if one.ratio > 1 + SAME:
                print(f"{one.ratio:.4f}  problem {one.seed}, {one.layers} layers, {one.devices} devices", flush=True)
                print(f"        best {one.plans[0]}\n        auto {one.plans[1]}", flush=True)
    fitting = [one for one in solved if one.best_s is not None]
    wrong = [one.seed for one in solved if one.best_s is None and one.auto_s is not None]
    optimal = sum(one.ratio <= 1 + SAME for one in fitting) / len(fitting)
    print(f"{len(solved)} problems, {len(fitting)} with a plan that fits; auto finds one where there is none: {wrong}")
    print(f"optimal {optimal:.1%} (asked {ASKED_OPTIMAL:.0%}), worst ratio {max(one.ratio for one in fitting):.4f} "
          f"(asked {ASKED_WORST})")  # fmt: skip
    for name, column in (("exhaustive", 0), ("auto", 1)):
        times = [one.seconds[column] for one in solved]
        print(f"{name}: median {format_seconds(statistics.median(times))}, longest {format_seconds(max(times))}")
    return int(optimal < ASKED_OPTIMAL or max(one.ratio for one in fitting) > ASKED_WORST or bool(wrong))
