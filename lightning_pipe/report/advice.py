"""Advice on a plan: at most three sentences, the most important first, and none that contradicts another.

The one place that advises. It is given all that advice depends on: what the user has decided, why batches are not cut,
the plan with its alternatives, and how good the measurements are. What the user has not set is not to be removed, what
the planner has chosen is not called wrong, and measurements that other work disturbed advise nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from lightning_pipe.core.timeline import Timeline
from lightning_pipe.report.account import accounts
from lightning_pipe.units import format_bytes, format_seconds, format_share, numbers_text

Kind = Literal["plan", "one device", "data parallel", "runner-up", "variant"]

UNEVEN = 1.1  # longest over mean computing time of the ranks, from which on the cut is worth a sentence
NOTICEABLE = 0.01  # share below which a loss is not mentioned, and a difference of two times is none
UNCERTAIN = 0.15  # by how much a predicted time may be wrong: no verdict on a difference below it
MOST_SENTENCES = 3
_LAYOUT = ("layout", "plan", "schedule", "stages_per_device")  # options that decide whether ranks are one stage


@dataclass(frozen=True)
class Alternative:
    """One way to train, as the judge sees it.

    Attributes:
        name: for people, e.g. `runner-up: gpipe, 8 micro-batches`.
        kind: what it is; a `variant` is the plan with another number of micro-batches.
        microbatches: micro-batches per batch, 1 where the batch is not cut.
        step_s: seconds per optimizer step.
        peak_bytes: peak memory of each rank.
        fits: whether every rank stays below its limit.
        bubble: mean over the ranks.
        bytes_sent: bytes that all ranks together send per step, sums of gradients included.
        stages: stages of the model; 1 on several ranks is data parallel training.
        difference: of the plan from the training of one device, as a sentence; "" where there is none.
    """

    name: str
    kind: Kind
    microbatches: int
    step_s: float
    peak_bytes: tuple[int, ...]
    fits: bool
    bubble: float
    bytes_sent: int
    stages: int
    difference: str = ""


@dataclass(frozen=True)
class PlanSituation:
    """What advice depends on.

    Attributes:
        chosen: names of the options that the user has set.
        whole: why batches are not cut, in words after "since"; "" if they may be.
        alternatives: the plan and others, as for `explain`; () if nothing was measured.
        timeline: the plan's simulated step.
        idle_stages: stages that hold no parameters and compute next to nothing.
        idle_ranks: ranks that compute nothing.
        microbatches: of the plan.
        is_disturbed: whether other work took a part of the processor while costs were measured.
    """

    chosen: Set[str]
    whole: str
    alternatives: Sequence[Alternative]
    timeline: Timeline
    idle_stages: Sequence[int] = ()
    idle_ranks: Sequence[int] = ()
    microbatches: int = 1
    is_disturbed: bool = False


def advice(situation: PlanSituation) -> list[str]:
    """Return at most three sentences on a plan, the most important first."""
    return [*islice(_sentences(situation), MOST_SENTENCES)]


def _sentences(situation: PlanSituation) -> Iterator[str]:
    by_kind = {alternative.kind: alternative for alternative in situation.alternatives}
    plan, one, replicas = (by_kind.get(kind) for kind in ("plan", "one device", "data parallel"))
    layout = [name for name in _LAYOUT if name in situation.chosen]
    if situation.idle_ranks:
        yield _idle_ranks(situation)
    if situation.idle_stages and layout:
        is_single = len(situation.idle_stages) == 1
        stages = f"{'Stage' if is_single else 'Stages'} {numbers_text(situation.idle_stages)}"
        yield (
            f"{stages} {'computes' if is_single else 'compute'} next to nothing: the step has too few operations "
            f"for {' and '.join(layout)}, or samples do not lie along batch_dim. Without {' and '.join(layout)} the "
            "planner uses fewer stages."
        )
    if plan is None:
        return
    if situation.is_disturbed:
        yield (
            "Other work took a part of the processor while operations were timed, so these predictions are rough and "
            "no advice is drawn from them; a start without other work measures again."
        )
        return
    if one is not None:
        yield _against_one_device(plan, one)
        if one.fits and one.step_s / plan.step_s < 1 + UNCERTAIN:
            return  # another layout is no advice beside that
    if replicas is not None:
        yield from _against_data_parallel(plan, replicas, situation, layout)
    if layout and not situation.idle_stages:
        yield from bottleneck_sentence(situation.timeline, "Predicted")


def _idle_ranks(situation: PlanSituation) -> str:
    ranks, count = situation.idle_ranks, situation.microbatches
    named = f"Rank {ranks[0]} computes" if len(ranks) == 1 else f"Ranks {numbers_text(ranks)} compute"
    why = f"batches are not cut, since {situation.whole}" if situation.whole else "the step mixes samples"
    batch = "1 micro-batch" if count == 1 else f"{count} micro-batches"
    return (
        f"{named} nothing: replicas take whole micro-batches in turn, as {why}, and the batch has {batch}. Use fewer "
        f"devices{'' if situation.whole else ', larger batches or more micro-batches'}."
    )


def _against_data_parallel(
    plan: Alternative, replicas: Alternative, situation: PlanSituation, layout: Sequence[str]
) -> Iterator[str]:
    ratio, times = replicas.step_s / plan.step_s, times_of(replicas, plan)
    if plan.stages == 1:
        if ratio < 1 - UNCERTAIN and "microbatches" in situation.chosen and replicas.microbatches == 1:
            yield f"Predicted: data parallel training on whole batches takes {times} the time: set microbatches=1."
        else:
            yield "This is data parallel training: every device holds the whole model."
    elif not replicas.fits:
        needed = format_bytes(max(replicas.peak_bytes))
        yield f"Predicted: data parallel training does not fit; every device would need {needed}."
    elif ratio < 1 - UNCERTAIN and layout:
        yield (
            f"Predicted: data parallel training fits and takes {times} the time. Without {' and '.join(layout)} it is "
            "chosen."
        )
    elif ratio < 1 + UNCERTAIN:
        yield f"Predicted: data parallel training fits and is about as fast ({times} the time)."
    else:
        sent = f"sends {format_bytes(replicas.bytes_sent)} per step instead of {format_bytes(plan.bytes_sent)}"
        yield f"Predicted: data parallel training takes {times} the time and {sent}."


def _against_one_device(plan: Alternative, one: Alternative) -> str:
    devices, gain = len(plan.peak_bytes), one.step_s / plan.step_s
    if not one.fits:
        return f"Predicted: one device would need {format_bytes(max(one.peak_bytes))}, which does not fit."
    other = " and versions='sync', which trains without late gradients" if plan.difference else ""
    if gain < 1 - UNCERTAIN:
        return (
            f"Predicted: one device fits and takes {times_of(one, plan)} the time of this plan: use devices=1{other}."
        )
    if gain < 1 + UNCERTAIN:
        as_fast = f"about as fast ({times_of(one, plan)} the time)"
        return f"Predicted: one device fits and is {as_fast}: consider devices=1{other}."
    why = ""
    if gain < devices:
        why = f"; {_why_not(plan)}"
    elif gain > devices * (1 + NOTICEABLE):
        why = "; more than linear, because smaller parts run faster or other work disturbed the measurements"
    share = format_share(gain / devices, 0)
    return f"Predicted speed-up on {devices} devices: {times_of(one, plan)} ({share} of linear){why}."


def _why_not(plan: Alternative) -> str:
    if plan.stages == 1:
        return "the rest goes to gradient all-reduce and the optimizer step"
    if plan.bubble < NOTICEABLE:
        return "uneven stages, the runtime and the links take the rest"
    return f"the bubble is {format_share(plan.bubble, 0)}, at both ends of the step or while ranks wait for each other"


def bottleneck_sentence(timeline: Timeline, word: Literal["Predicted", "Measured"]) -> Iterator[str]:
    """Yield a sentence on the rank that computes longest, if the cut is uneven; arguments as of `time_sentences`."""
    by_rank = accounts(timeline)
    busy = [sum(account.computes.values()) for account in by_rank]
    mean = sum(busy) / len(busy) if busy else 0.0
    if mean and max(busy) > UNEVEN * mean:
        slowest = by_rank[busy.index(max(busy))]
        stages = sorted({stage for stage, _ in slowest.computes})
        holds = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        idle = [str(account.rank) for account, seconds in zip(by_rank, busy, strict=True) if not seconds]
        idle_text = f"; idle: rank{'s' if len(idle) > 1 else ''} {', '.join(idle)}" if idle else ""
        yield (
            f"{word} bottleneck: rank {slowest.rank} ({holds}) computes {format_seconds(max(busy))} per step, "
            f"{max(busy) / mean:.2f}x the average{idle_text}."
        )


def times_of(other: Alternative, plan: Alternative) -> str:
    """Return how many times as long as the plan another way to train takes, for people."""
    return f"{other.step_s / plan.step_s:.2f}x"
