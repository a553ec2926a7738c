"""Rounds of a plan: which plans have them, and the round in the middle of many, by which they are priced.

A policy of weight versions changes what is trained, so it is asked for (`planner.problem.Constraints.versions`), and is
no part of a plan: the same plan file runs with any policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

from lightning_pipe.core.plan import Plan
from lightning_pipe.core.program import AnyCompute, Layout, Traffic, VerifiedProgram
from lightning_pipe.core.versions import PinOlder, Predict, PredictBack
from lightning_pipe.cost.versions import StageVersions, WeightCounts
from lightning_pipe.errors import PlanError
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.predictions import PredictionCache
from lightning_pipe.schedule.rounds import delays_of
from lightning_pipe.schedule.verification.rounds import verify_rounds
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import POLICIES, WeightPolicy, same_as
from lightning_pipe.units import counted_noun, format_bytes

VersionsRead: TypeAlias = dict[tuple[int, AnyCompute], str]  # by rank and compute


def middle_round(policy: WeightPolicy, layout: Layout, *, sizes: tuple[int, ...], traffic: Traffic) -> VerifiedProgram:
    """Return the program of a round in the middle of many; `simulator.ahead.steady_step` says when it runs.

    Args:
        policy: of weight versions.
        layout: one stage per rank, with any replicas.
        sizes: samples of the micro-batches of a batch; all batches are alike.
        traffic: between the stages.
    """
    seam, known = policy.middle(layout, sizes)
    return verify(lower(policy.order(layout, seam), layout=layout, sizes=known, traffic=traffic, seam=seam))


def versions_read(rounds: Sequence[VerifiedProgram], policy: WeightPolicy, first: int, last: int) -> VersionsRead:
    """Return which version every compute of some rounds reads, counted from the oldest that one of them reads.

    Args:
        rounds: from an empty pipeline to an empty one.
        policy: that they follow.
        first, last: rounds whose computes are meant; micro-batches are numbered from those of the first.
    """
    batch = rounds[0].batch
    reads = [read for read in verify_rounds(rounds, policy) if first <= read.round <= last]
    oldest = min(read.version.steps for read in reads)
    return {
        (read.rank, replace(read.compute, microbatch=read.compute.microbatch - first * batch)): str(
            read.version._replace(steps=read.version.steps - oldest)
        )
        for read in reads
    }


def versions_sentence(versions: str, plan: Plan, extra_bytes: Sequence[int]) -> str:
    """Return what a policy of weight versions changes of the training, and what it holds.

    Args:
        versions: the policy's name.
        plan: the plan.
        extra_bytes: of each rank, what versions and predictions hold.
    """
    policy, layout, count = POLICIES[versions], plan.layout, plan.microbatches
    lives, delays = policy.lives(layout, count), delays_of(policy, len(layout.stages), count)
    twin = f", the same policy as {other!r}," if (other := same_as(versions)) else ""
    return (
        f"versions={versions!r}{twin} is not the training of one device: gradients are late by up to "
        f"{_most(delays, 'update')}, and a rank holds up to {_most(lives, 'version')} of the weights, "
        f"{format_bytes(max(extra_bytes))} more than without."
    )


def _most(numbers: Sequence[int], noun: str) -> str:
    """Return the largest of the numbers of the stages with a noun, and all of them where they differ."""
    by_stage = f" (by stage: {' '.join(map(str, numbers))})" if len(set(numbers)) > 1 else ""
    return counted_noun(max(numbers), noun) + by_stage


def stage_versions(policy: WeightPolicy, layout: Layout, microbatches: int) -> tuple[StageVersions, ...]:
    """Return the versions that a rank of each stage holds, and the passes of its predictions, in the steady state.

    Args:
        policy: of weight versions.
        layout: one stage per rank.
        microbatches: of a batch.
    """
    stages, ahead = [], policy.ahead(layout, microbatches)
    for stage, live in enumerate(policy.lives(layout, microbatches)):
        copies = live - 1 - policy.predicted
        entered = min(copies, -(-stage // microbatches)) if policy.keeps_entries else 0
        forwards = copies if PinOlder.code in policy.work else entered
        scratch, passes = _predictions(policy, layout, microbatches, stage)
        differs = policy.correction == "discrepancy" or (policy.prediction == "difference" and any(scratch))
        spikes = policy.correction == "spike" and ahead[stage] > 0
        stages.append(
            StageVersions(
                WeightCounts(forwards, copies - forwards),
                scratch._replace(everything=scratch.everything + differs),
                passes._replace(everything=passes.everything + differs + spikes),
            )
        )
    return tuple(stages)


@lru_cache(maxsize=1024)
def _predictions(policy: WeightPolicy, layout: Layout, batch: int, stage: int) -> tuple[WeightCounts, WeightCounts]:
    """Return the most predictions that a rank of a stage keeps, and those that it makes in a round in the middle."""
    horizons = policy.horizons_of(stage, len(layout.stages), batch)
    if not any(horizons):
        return WeightCounts(), WeightCounts()
    seam, sizes = policy.middle(layout, (layout.ranks,) * batch)
    order, traffic = policy.order(layout, seam), chain(len(layout.stages))
    program = lower(order, layout=layout, sizes=sizes, traffic=traffic, seam=seam)
    works = [work for work in program.ranks[layout.stages[stage][0]] if isinstance(work, (Predict, PredictBack))]
    cache, made = PredictionCache[int](horizons, policy.predicts_once), list[int]()  # horizons, in their order
    most = most_everything = begun = 0

    def make(horizon: int) -> int:
        made.append(horizon)
        return len(made) - 1

    for number in range(2 + -(-max(policy.ahead(layout, batch)) // batch)):  # the first ones fill the cache
        begun = len(made)
        for work in works:
            cache.read("F" if isinstance(work, Predict) else "I", number + work.microbatch // batch, make=make)
            there = set(cache.there)
            most = max(most, len(there))
            most_everything = max(most_everything, sum(made[k] == horizons[0] for k in there))
        cache.step()
    passes, everything = len(made) - begun, sum(horizon == horizons[0] for horizon in made[begun:])
    return WeightCounts(most_everything, most - most_everything), WeightCounts(everything, passes - everything)


def refuse_rounds(plan: Plan, *, versions: str, ties: Sequence[str] = ()) -> None:
    """Check that a plan can run ahead.

    Args:
        plan: the plan.
        versions: the policy's name.
        ties: parameters that several stages train, where these are known already.

    Raises:
        PlanError: naming what stands in the way, and the way out.
    """
    ranks = [rank for stage in plan.layout.stages for rank in stage]
    wanted = f"versions={versions!r} runs forwards of the next batch ahead"
    if len(plan.layout.stages) < 2:
        raise PlanError(
            f"{wanted}, but the plan is data parallel training, in which nothing waits for the next batch. Set a "
            "layout such as layout='1-1', or versions='sync'."
        )
    if len(set(ranks)) < len(ranks) or plan.schedule != "1f1b" or plan.order:
        raise PlanError(
            f"{wanted}, which needs schedule='1f1b' and one stage per rank; found {plan.schedule} on the layout "
            f"{plan.layout.stages}. Remove `schedule`, `stages_per_device` and `order`, or set versions='sync'."
        )
    if any(stage.offload for stage in plan.stages):
        raise PlanError(f"{wanted}, so its stages cannot offload. Remove `offload` from the plan, or the versions.")
    if plan.shard_optimizer and POLICIES[versions].is_corrected:
        raise PlanError(
            f"{wanted} and corrects the optimizer's step, so ranks cannot share optimizer state. Set "
            "`shard_optimizer: false` in the plan, or versions='2bw'."
        )
    if ties and not POLICIES[versions].is_alike_on_stages:
        raise PlanError(
            f"{wanted}, but {ties[0]} is trained by several stages, which would read different versions of it. Set "
            "versions='2bw', in which a batch reads one version, or versions='sync'."
        )
    for stage in plan.layout.whole:
        if plan.microbatches % (count := len(plan.layout.stages[stage])):
            raise PlanError(
                f"{wanted}, but the {count} replicas of stage {stage} take {plan.microbatches} micro-batches in turn; "
                f"expected a multiple of {count}. Set microbatches to one."
            )
