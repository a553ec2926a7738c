"""Candidates: plans in numbers, before they are named and judged; what planners search through."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from lightning_pipe.core.cluster import Cluster
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import Plan, Share, StagePlan
from lightning_pipe.planner.problem import Problem

_LARGEST_WEIGHT = 64  # speeds are taken as fractions with at most this denominator


@dataclass(frozen=True)
class Candidate:
    """A 1F1B pipeline.

    Attributes:
        cuts: graph positions at which stages 1, 2, ... begin, rising.
        ranks: ranks of each stage.
        microbatches: micro-batches per batch.
        depths: warm-up forwards of each stage, never growing along the stages.
    """

    cuts: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
    microbatches: int
    depths: tuple[int, ...]

    def plan(self, problem: Problem) -> Plan:
        """Return the plan with the names of the problem's graph; all forwards first is GPipe where that is wished."""
        schedule = problem.constraints.schedule or "1f1b"
        options: dict[str, int | str] = {"warmup": warmup_name(self.depths)} if schedule == "1f1b" else {}
        stages = stage_plans(problem, self.cuts, self.ranks)
        return Plan(stages, self.microbatches, schedule, options, problem.graph.fingerprint)


def stage_plans(problem: Problem, cuts: Sequence[int], ranks: Sequence[tuple[int, ...]]) -> tuple[StagePlan, ...]:
    """Return the stages of a plan: named, and with shares that suit their nodes and devices."""
    bounds = itertools.pairwise((0, *cuts, len(problem.graph.nodes)))
    return tuple(_stage(problem, begin, end, group) for (begin, end), group in zip(bounds, ranks, strict=True))


def _stage(problem: Problem, begin: int, end: int, ranks: tuple[int, ...]) -> StagePlan:
    at = problem.graph.nodes[begin].name if begin else ""
    share = share_of(problem.graph, begin, end, replicas=len(ranks))
    return StagePlan(at, ranks, share, weights_of(problem.cluster, ranks) if share == "samples" else ())


def share_alike(problem: Problem, ranks: Iterable[tuple[int, ...]]) -> bool:
    """Return whether stages on these ranks share samples alike wherever they are cut: nothing is sent in slices."""
    shares = {(len(group), weights_of(problem.cluster, group)) for group in ranks}
    return len(shares) == 1 and (not problem.graph.coupled or max(shares)[0] == 1)


def can_meet(problem: Problem, cuts: Sequence[int], ranks: Sequence[tuple[int, ...]]) -> bool:
    """Return whether stages on these ranks can meet at these cuts: they share alike where nothing can be sliced."""
    unsliceable = problem.graph.unsliceable
    if unsliceable.isdisjoint(cuts):
        return True
    shares = [(len(stage.ranks), stage.share, stage.weights) for stage in stage_plans(problem, cuts, ranks)]
    meeting = zip(cuts, itertools.pairwise(shares), strict=True)
    return all(one == two for cut, (one, two) in meeting if cut in unsliceable)


def share_of(graph: Graph, begin: int, end: int, *, replicas: int) -> Share:
    """Return how the replicas of a stage share: whole micro-batches where nodes mix samples."""
    coupled = set(graph.coupled)
    mixes = replicas > 1 and any(node.name in coupled for node in graph.nodes[begin:end])
    return "microbatches" if mixes else "samples"


def weights_of(cluster: Cluster, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the proportions in which ranks share samples, so that all take the same time; () if they are equal."""
    speeds = [cluster.device(rank).speed for rank in ranks]
    if len(set(speeds)) == 1:
        return ()
    fractions = [Fraction(speed / max(speeds)).limit_denominator(_LARGEST_WEIGHT) for speed in speeds]
    shared = max(fraction.denominator for fraction in fractions)
    weights = [max(1, round(speed / max(speeds) * shared)) for speed in speeds]
    return tuple(weights) if len(set(weights)) > 1 else ()


def warmup_name(depths: Sequence[int]) -> str:
    """Return depths as the option of 1F1B: the name of the policy, if they follow one."""
    stages = len(depths)
    if list(depths) == [stages - s for s in range(stages)]:
        return "pa"
    if list(depths) == [2 * (stages - s) - 1 for s in range(stages)]:
        return "pb"
    return ",".join(map(str, depths))


def falling(depths: Sequence[int]) -> tuple[int, ...]:
    """Return depths lowered so that each is less than the one before it, down to one.

    Where two neighbours are equally deep, the first cannot be answered before it has sent all its warm-up forwards, and
    both wait for each other in turn.
    """
    return tuple(max(1, depth) for depth in itertools.accumulate(depths, lambda before, depth: min(depth, before - 1)))


def never_growing(depths: Sequence[int]) -> tuple[int, ...]:
    """Return depths lowered so that no stage has more than the one before it, and every one has at least one."""
    return tuple(max(1, depth) for depth in itertools.accumulate(depths, min))
