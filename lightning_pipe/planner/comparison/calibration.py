"""Calibration: the costs of a problem made those under which its plan takes as long as it did when it ran.

What was recorded beside its prediction (`report.comparison`) says where time went, so every kind of cost is set right
by itself, one after the other:

    computes     the operations of a stage take as many times as long as its F, I and W did
    calls        what a rank stood still for although everything was there is spread over its computes
    optimizer    steps take as many times as long as they did
    links        messages take so many times as long that ranks wait for those on their way as long as they did
    sums         gradients are summed in so many times as long that optimizers wait for them as long as they did
    memory       devices have as much less as a rank took more than was predicted

Links and sums overlap with computes, so the simulator says by what they are to be multiplied. If the plan has only
one of the two, the other is multiplied too: both go over the same wires. Whether all of this together explains the step
is for the caller to look at: `judge` the plan once more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lightning_pipe.core.cluster import Cluster, Host, Link, Reduction
from lightning_pipe.core.profile import OptimizerProfile, Profile
from lightning_pipe.core.program import AnyCompute
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.cost.comm import all_reduce_s
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.problem import Problem
from lightning_pipe.report import Comparison
from lightning_pipe.report.account import accounts
from lightning_pipe.report.comparison import Figure
from lightning_pipe.schedule.rules import holders

_MOST_DOUBLINGS = 10  # by which links and sums may take longer, or less long, than was thought
_HALVINGS = 12  # of the range in which their factor lies
_LEAST = 0.005  # share of a step below which waiting for links or sums is left as it is


def calibrated(problem: Problem, judged: Judged, comparison: Comparison) -> Problem:
    """Return the problem with the costs that a run has shown.

    Args:
        problem: what the plan was made for.
        judged: the plan.
        comparison: of its first steps.
    """
    profile = _with_computes(problem.profile, judged, comparison)
    profile = replace(
        profile,
        call_s=profile.call_s + _idle_s(judged, comparison),
        optimizer=_times(profile.optimizer, _ratio(rank.optimizer for rank in comparison.ranks)),
    )
    found = replace(problem, profile=profile, cluster=_with_memory(problem.cluster, comparison))
    least_s = _LEAST * comparison.step.measured
    ranks, groups = frozenset(judged.representatives), _groups(judged)
    waited_s = sum(stage.transfer.measured for stage in comparison.stages if stage.rank in ranks)
    summed_s = _summed_s([rank.reduction.measured for rank in comparison.ranks], groups)

    def transfer_s(now: Timeline) -> float:
        return sum(gap.transfer for one in accounts(now) if one.rank in ranks for gap in one.gaps)

    def sum_s(now: Timeline) -> float:
        by_rank = {account.rank: account.reduction for account in accounts(now)}
        return _summed_s([by_rank[representative] for representative in judged.representatives], groups)

    def links(problem: Problem, factor: float) -> Problem:
        return _with_links(problem, factor, sums=not groups)

    def sums(problem: Problem, factor: float) -> Problem:
        changed = replace(problem, cluster=_with_sums(problem.cluster, groups, factor))
        return changed if judged.prices.traffic.edges else _with_links(changed, factor)

    if judged.prices.traffic.edges:
        found = _until(found, judged, transfer_s, target=waited_s, scaled=links, least_s=least_s)
    return _until(found, judged, sum_s, target=summed_s, scaled=sums, least_s=least_s) if groups else found


def _ratio(figures: Iterable[Figure]) -> float:
    """Return measured over predicted seconds of all together; 1 where either is nothing."""
    listed = list(figures)
    predicted, measured = sum(f.predicted for f in listed), sum(f.measured for f in listed)
    return measured / predicted if predicted and measured else 1.0


def _with_computes(profile: Profile, judged: Judged, comparison: Comparison) -> Profile:
    """Return a profile whose operations take as long as the computes in which they ran."""
    factors: dict[int, float] = {}
    for stage, work in enumerate(judged.prices.works):
        computes = [figures.computes for figures in comparison.stages if figures.stage == stage]
        for half, kinds in (
            (work.weight_grad, "WB"),
            (work.input_grad, "IB"),
            (work.forward, "F"),  # last: what is recomputed is in several halves
        ):
            factor = _ratio(figure for one in computes for kind, figure in one.items() if kind in kinds)
            factors.update(dict.fromkeys(half.operations, factor))
    seconds = (tuple(s * factors.get(o, 1.0) for s in of_one) for o, of_one in enumerate(profile.seconds))
    return replace(profile, seconds=tuple(seconds))


def _idle_s(judged: Judged, comparison: Comparison) -> float:
    """Return the seconds per compute for which ranks stood still although everything was there."""
    idle_s = sum(stage.overhead.difference for stage in comparison.stages)
    computes = sum(isinstance(event.instruction, AnyCompute) for event in judged.timeline.events)
    ranks = len({event.rank for event in judged.timeline.events}) / max(1, len(comparison.ranks))
    return max(0.0, idle_s * ranks / max(1, computes))


def _times(optimizer: OptimizerProfile, factor: float) -> OptimizerProfile:
    return replace(
        optimizer,
        seconds_per_byte=optimizer.seconds_per_byte * factor,
        seconds_per_tensor=optimizer.seconds_per_tensor * factor,
        fixed_s=optimizer.fixed_s * factor,
    )


def _with_memory(cluster: Cluster, comparison: Comparison) -> Cluster:
    """Return devices with as much less memory as was taken more than predicted."""
    over = max((figures.total.ratio for figures in comparison.memory), default=1.0)
    if over <= 1.0 or math.isinf(over):
        return cluster

    def less(host: Host) -> Host:
        devices = (replace(device, memory_bytes=int(device.memory_bytes / over)) for device in host.devices)
        return replace(host, devices=tuple(devices))

    return replace(cluster, hosts=tuple(map(less, cluster.hosts)))


def _slower(link: Link, factor: float) -> Link:
    return Link(link.latency_s * factor, link.bytes_per_s / factor)


def _with_links(problem: Problem, factor: float, *, sums: bool = False) -> Problem:
    """Return a problem whose messages take so many times as long; its measured sums too, if wanted."""
    cluster = problem.cluster
    hosts = (
        replace(host, inside=_slower(host.inside, factor), network=_slower(host.network, factor))
        for host in cluster.hosts
    )
    links = (replace(pair, link=_slower(pair.link, factor)) for pair in cluster.links)
    cluster = replace(cluster, hosts=tuple(hosts), links=tuple(links))
    profile = replace(problem.profile, message_s=problem.profile.message_s * factor)
    return replace(problem, profile=profile, cluster=_with_sums(cluster, {}, factor) if sums else cluster)


def _groups(judged: Judged) -> dict[tuple[int, ...], int]:
    """Return the groups of ranks that sum gradients, with the bytes that they sum."""
    found: dict[tuple[int, ...], int] = {}
    for bucket in judged.prices.traffic.buckets:
        ranks = tuple(sorted(holders(bucket, layout=judged.plan.layout)))
        if len(ranks) > 1:
            found[ranks] = found.get(ranks, 0) + bucket.bytes
    return found


def _with_sums(cluster: Cluster, groups: dict[tuple[int, ...], int], factor: float) -> Cluster:
    """Return a cluster whose sums, those of these groups at least, take so many times as long."""
    known = list(cluster.reductions)
    for ranks, count in groups.items():
        if count and cluster.reduction(ranks) is None:  # by formula, which is a line for most numbers of bytes
            latency_s = all_reduce_s(cluster, ranks, count=0)
            bytes_s = all_reduce_s(cluster, ranks, count=count) - latency_s
            known.append(Reduction(ranks, latency_s, count / bytes_s if bytes_s else math.inf))

    def slower(found: Reduction) -> Reduction:
        line = _slower(Link(found.latency_s, found.bytes_per_s), factor)
        small = None if found.small is None else _slower(found.small, factor)
        return Reduction(found.ranks, line.latency_s, line.bytes_per_s, small)

    return replace(cluster, reductions=tuple(map(slower, known)))


def _summed_s(by_rank: Sequence[float], groups: Iterable[tuple[int, ...]]) -> float:
    """Return the seconds from the last compute to the optimizer: in every group those of the rank that came last."""
    return sum(min(by_rank[rank] for rank in ranks) for ranks in groups)


def _until(
    problem: Problem,
    judged: Judged,
    seconds: Callable[[Timeline], float],
    *,
    target: float,
    scaled: Callable[[Problem, float], Problem],
    least_s: float,
) -> Problem:
    """Return a problem whose costs are multiplied by a number so that the plan has so many seconds of something.

    Args:
        problem: the costs.
        judged: the plan.
        seconds: returns them; they grow with the number.
        target: how many were measured.
        scaled: returns the problem with costs multiplied.
        least_s: how much less or more is taken for the same.
    """

    def missing_s(factor: float) -> float:
        changed = scaled(problem, factor)
        return target - seconds(Judge(changed).retimed(judged))

    if abs(missing_s(1.0)) <= least_s:
        return problem
    low, high = -float(_MOST_DOUBLINGS), float(_MOST_DOUBLINGS)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if missing_s(2.0**middle) > 0 else (low, middle)
    return scaled(problem, 2.0 ** ((low + high) / 2))
