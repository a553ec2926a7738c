"""Rounds of a plan: which plans have them, and the round in the middle of many, by which they are priced.

A policy of weight versions changes what is trained, so it is asked for (`planner.problem.Constraints.versions`), and is
no part of a plan: the same plan file runs with any policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.core.plan import Plan
from lightning_pipe.core.program import Layout, Traffic, VerifiedProgram
from lightning_pipe.core.versions import PinOlder
from lightning_pipe.cost.versions import StageVersions
from lightning_pipe.errors import PlanError
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import POLICIES, WeightPolicy


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


def stage_versions(policy: WeightPolicy, layout: Layout, microbatches: int) -> tuple[StageVersions, ...]:
    """Return the versions that a rank of each stage holds in the steady state.

    Args:
        policy: of weight versions.
        layout: one stage per rank.
        microbatches: of a batch.
    """
    older = PinOlder.code in policy.work
    return tuple(
        StageVersions(policy.live(ahead, microbatches) - 1, older, policy.scratch)
        for ahead in policy.ahead(layout, microbatches)
    )


def refuse_rounds(plan: Plan, *, versions: str, ties: Sequence[str]) -> None:
    """Check that a plan can run ahead.

    Args:
        plan: the plan.
        versions: the policy's name.
        ties: parameters that several stages train.

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
    if ties and POLICIES[versions].promise != "batch":
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
