"""Capacity: the largest batch, and the deepest model, that trains within the memory of a cluster, policy by policy.

    keep all       1F1B that keeps all it saves; the planner chooses cuts and warm-up
    gpipe          all forwards first, everything kept (Huang et al. 2019, without its recomputation)
    pipedream      1F1B with a version of the weights per micro-batch in flight (Narayanan et al., SOSP 2019): stage s
                   of p keeps p - s of them; no flush, so a step takes what the busiest device computes
    vpipe          1F1B whose stages recompute a share each, in the order of the graph (after Zhao et al., TPDS 2022)
    recompute all  1F1B that drops all that can be recomputed
    offload all    1F1B that offloads all it saves, and waits for the copies as soon as memory asks for it
    planned        what this package plans: recompute or offload per tensor, shared optimizer state, cuts and warm-up

The number of micro-batches is that of the problem's constraints, and all stages have one device; what grows is the
micro-batch. `gpipe`, `pipedream`, `vpipe` and the two `all` are cut by time, as their planners do; for the depth of a
model its batch stays. Largest means the last that fits before the first that does not: galloping, then halving. Nothing
is executed: the simulator judges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from lightning_pipe.core.cluster import NO_SWAP
from lightning_pipe.core.plan import Plan
from lightning_pipe.cost.activations import candidates
from lightning_pipe.cost.prices import Pricer
from lightning_pipe.cost.stage import StageWork
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.evaluation.copies import tighter
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.evaluation.heads import with_forwards_first
from lightning_pipe.planner.evaluation.resolve import places_of
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.planner.systems.uniform import uniform

T = TypeVar("T")

_UNLIMITED = 1 << 62  # bytes
_MOST = 1 << 14  # samples of a micro-batch, or layers, that are tried
_SHARES = 16  # steps in which a stage of `vpipe` gives up more


@dataclass(frozen=True)
class Trial:
    """One policy on one problem.

    Attributes:
        problem: what was asked.
        judged: its plan.
        peaks: bytes of every rank, with what the simulator does not know of (versions of weights).
        step_s: seconds of a batch.
    """

    problem: Problem
    judged: Judged
    peaks: tuple[int, ...]
    step_s: float

    @property
    def fits(self) -> bool:
        """Return whether every rank has the memory."""
        cluster = self.problem.cluster
        return all(peak <= cluster.device(rank).memory_bytes for rank, peak in enumerate(self.peaks))


Policy = Callable[[Problem, Pricer, str], Trial]  # a problem, its prices, and a planner's name


@dataclass(frozen=True)
class Largest:
    """What one policy reaches.

    Attributes:
        policy: its name.
        size: samples of a micro-batch, or layers; 0 if not even one fits.
        trial: at that size; None if nothing fits.
        reason: why nothing fits, if that is known.
    """

    policy: str
    size: int
    trial: Trial | None = None
    reason: str = ""


def largest_batches(problem: Problem, *, policies: Iterable[str] = (), planner: str = "auto") -> Iterator[Largest]:
    """Yield the largest micro-batch of each policy.

    Args:
        problem: memory, costs and, in its constraints, the number of micro-batches; the search begins at its samples.
        policies: names of `POLICIES`; all by default.
        planner: who plans for `keep all` and `planned`.
    """
    count = problem.constraints.microbatches or 2 * problem.cluster.ranks
    constraints = Constraints(microbatches=count, replicas=(1,) * problem.cluster.ranks)
    pricer = Pricer(problem.graph, profile=problem.profile, cluster=problem.cluster)
    for name in policies or POLICIES:

        def tried(size: int, policy: Policy = POLICIES[name]) -> Trial:
            return policy(replace(problem, samples=size * count, constraints=constraints), pricer, planner)

        yield _reached(name, tried, start=max(1, problem.samples // count))


def deepest_models(
    problem_of: Callable[[int], Problem], *, policies: Iterable[str] = (), planner: str = "auto", start: int = 1
) -> Iterator[Largest]:
    """Yield the deepest model of a family that each policy trains.

    Args:
        problem_of: a depth -> the problem of a model so deep, with the same batch and number of micro-batches each.
        policies: names of `POLICIES`; all by default.
        planner: who plans for `keep all` and `planned`.
        start: depth at which the search begins.
    """
    known: dict[int, tuple[Problem, Pricer]] = {}

    def priced(depth: int) -> tuple[Problem, Pricer]:
        if depth not in known:
            problem = problem_of(depth)
            count = problem.constraints.microbatches or 2 * problem.cluster.ranks
            constraints = Constraints(microbatches=count, replicas=(1,) * problem.cluster.ranks)
            pricer = Pricer(problem.graph, profile=problem.profile, cluster=problem.cluster)
            known[depth] = replace(problem, constraints=constraints), pricer
        return known[depth]

    for name in policies or POLICIES:

        def tried(depth: int, policy: Policy = POLICIES[name]) -> Trial:
            return policy(*priced(depth), planner)

        yield _reached(name, tried, start=start)


def _reached(name: str, tried: Callable[[int], Trial], *, start: int) -> Largest:
    reasons: list[str] = []

    def fitting(size: int) -> Trial | None:
        try:
            trial = tried(size)
        except PlanError as error:
            reasons.append(str(error))
            return None
        return trial if trial.fits else None

    size, trial = _last(fitting, start=start)
    return Largest(name, size, trial, "" if trial is not None else next(iter(reasons), "one sample is too much"))


def _last(fitting: Callable[[int], T | None], *, start: int) -> tuple[int, T | None]:
    """Return the largest number that has a value, and its value, if those that have one are below those without."""
    low, high = 0, _MOST + 1
    best: T | None = None
    size = min(start, _MOST)
    while high - low > 1:
        found = fitting(size)
        if found is None:
            high = size
        else:
            low, best = size, found
        size = min(2 * low, _MOST) if high > _MOST and low else (low + high) // 2
    return low, best


def _keep_all(problem: Problem, pricer: Pricer, planner: str) -> Trial:
    return _trial(problem, propose(problem, planner)[0])


def _planned(problem: Problem, pricer: Pricer, planner: str) -> Trial:
    constraints = replace(
        problem.constraints, memory_policies=frozenset(("recompute", "offload")), shard_optimizer="auto"
    )
    wished = replace(problem, constraints=constraints)
    return _trial(wished, propose(wished, planner)[0])


def _gpipe(problem: Problem, pricer: Pricer, planner: str) -> Trial:
    plan = replace(_cut_by_time(problem), schedule="gpipe", options={})
    return _trial(problem, Judge(problem, pricer).judge(plan))


def _pipedream(problem: Problem, pricer: Pricer, planner: str) -> Trial:
    judged = Judge(problem, pricer).judge(_cut_by_time(problem))
    sizes, last = problem.graph.parameter_bytes, len(judged.plan.stages) - 1
    versions = [
        (last - s) * sum(sizes[name] for name in work.parameters) for s, work in enumerate(pricer.works(judged.cuts))
    ]
    ranks = {stage.ranks[0]: extra for stage, extra in zip(judged.plan.stages, versions, strict=True)}
    peaks = tuple(peak + ranks[rank] for rank, peak in enumerate(judged.peak_bytes))
    return Trial(problem, judged, peaks, max(judged.timeline.busy(rank) for rank in judged.timeline.ranks))


def _recompute_all(problem: Problem, pricer: Pricer, planner: str) -> Trial:
    judge, plan = Judge(problem, pricer), _cut_by_time(problem)
    works = pricer.works(judge.judge(plan).cuts)
    return _trial(problem, judge.judge(_giving_up(plan, problem, works, [1.0] * len(works))))


def _offload_all(problem: Problem, pricer: Pricer, planner: str) -> Trial:
    if any(host.swap == NO_SWAP for host in problem.cluster.hosts):
        raise PlanError("no link to a host's memory is known (`swap` of the cluster)")
    judge, plan = Judge(problem, pricer), _cut_by_time(problem)
    works = pricer.works(judge.judge(plan).cuts)
    stages = tuple(
        replace(stage, offload=places_of(problem.graph, work, work.saved))
        for stage, work in zip(plan.stages, works, strict=True)
    )
    trial = _trial(problem, judge.judge(replace(plan, stages=stages)))
    for waiting in () if trial.fits else tighter(trial.judged.plan):
        trial = _trial(problem, judge.judge(waiting))
        if trial.fits:
            break
    return trial


def _vpipe(problem: Problem, pricer: Pricer, planner: str) -> Trial:
    judge, plan = Judge(problem, pricer), _cut_by_time(problem)
    judged = judge.judge(plan)
    works = pricer.works(judged.cuts)
    shares = [0] * len(works)
    while (over := _overfull(problem, judged)) and any(shares[s] < _SHARES for s in over):
        shares = [share + (s in over and share < _SHARES) for s, share in enumerate(shares)]
        judged = judge.judge(_giving_up(plan, problem, works, [share / _SHARES for share in shares]))
    return _trial(problem, judged)


def _overfull(problem: Problem, judged: Judged) -> list[int]:
    cluster = problem.cluster
    over = {r for r, peak in enumerate(judged.peak_bytes) if peak > cluster.device(r).memory_bytes}
    return [s for s, stage in enumerate(judged.plan.stages) if over.intersection(stage.ranks)]


def _giving_up(plan: Plan, problem: Problem, works: Sequence[StageWork], shares: Sequence[float]) -> Plan:
    """Return a plan whose stages recompute this share of what can be recomputed, in the order of the graph."""

    def chosen(work: StageWork, share: float) -> tuple[str, ...]:
        found = sorted(c.memory for c in candidates(problem.graph, work) if c.is_remakeable)
        return places_of(problem.graph, work, found[: round(share * len(found))])

    stages = (
        replace(stage, recompute=chosen(work, share))
        for stage, work, share in zip(plan.stages, works, shares, strict=True)
    )
    return replace(plan, stages=tuple(stages))


def _cut_by_time(problem: Problem) -> Plan:
    """Return 1F1B with the cuts that balance time best, whatever memory there is, and its least warm-up.

    GPipe where backwards wait for all forwards.
    """
    hosts = (
        replace(host, devices=tuple(replace(device, memory_bytes=_UNLIMITED) for device in host.devices))
        for host in problem.cluster.hosts
    )
    outline = uniform(replace(problem, cluster=replace(problem.cluster, hosts=tuple(hosts))))[0]
    plan = outline.plan(with_forwards_first(problem))
    return replace(plan, options={"warmup": "pa"}) if plan.options else plan


def _trial(problem: Problem, judged: Judged) -> Trial:
    return Trial(problem, judged, judged.peak_bytes, judged.step_s)


POLICIES: Mapping[str, Policy] = {
    "keep all": _keep_all,
    "gpipe": _gpipe,
    "pipedream": _pipedream,
    "vpipe": _vpipe,
    "recompute all": _recompute_all,
    "offload all": _offload_all,
    "planned": _planned,
}
