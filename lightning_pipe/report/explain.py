"""Summary of a plan: gains and costs against one device, data parallel training and other plans.

All times are predictions of the same simulator, so every sentence begins with "Predicted"; sentences on a recorded step
begin with "Measured". The summary is as ready to advise against a pipeline as for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table

from lightning_pipe.core.timeline import Timeline
from lightning_pipe.report.account import Account, accounts
from lightning_pipe.report.table import WIDTH, text_of, wrapped
from lightning_pipe.units import format_bytes, format_seconds, format_share

Kind = Literal["plan", "one device", "data parallel", "runner-up", "variant"]

UNEVEN = 1.1  # longest over mean computing time of the ranks, from which on the cut is worth a sentence
NOTICEABLE = 0.01  # share below which a loss is not mentioned, and a difference of two times is none
UNCERTAIN = 0.15  # by how much a predicted time may be wrong: no verdict on a difference below it


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


def explain(alternatives: Sequence[Alternative], *, timeline: Timeline, width: int = WIDTH) -> str:
    """Return the summary of a plan: sentences, and a table of the alternatives.

    Args:
        alternatives: exactly one of kind "plan", and any others, on the same batch.
        timeline: the plan's simulated step.
        width: characters per line.
    """
    summary = (wrapped(sentence, width) for sentence in sentences(alternatives, timeline=timeline))
    return "\n".join([*summary, "", alternatives_table(alternatives, width=width)])


def sentences(alternatives: Sequence[Alternative], *, timeline: Timeline) -> list[str]:
    """Return the sentences of a summary; arguments as for `explain`."""
    plan, others = _plan_and_others(alternatives)
    return [
        *filter(None, [plan.difference]),
        *(sentence for other in others for sentence in _against(plan, other)),
        *_microbatches(plan, [other for other in others if other.kind == "variant"]),
        *time_sentences(timeline, "Predicted"),
        f"Predicted memory: {_range(plan.peak_bytes)} per device{'' if plan.fits else ', which does not fit'}.",
    ]


def main_sentences(alternatives: Sequence[Alternative], *, timeline: Timeline) -> list[str]:
    """Return at most three sentences: against one device, against data parallel training, and the bottleneck."""
    plan, others = _plan_and_others(alternatives)
    baselines = [other for other in others if other.kind in ("one device", "data parallel")]
    against = [sentence for other in baselines for sentence in _against(plan, other)]
    return [*against, *list(time_sentences(timeline, "Predicted"))[-1:]]


def _plan_and_others(alternatives: Sequence[Alternative]) -> tuple[Alternative, list[Alternative]]:
    (plan,) = [alternative for alternative in alternatives if alternative.kind == "plan"]
    return plan, [alternative for alternative in alternatives if alternative.kind != "plan"]


def _against(plan: Alternative, other: Alternative) -> Iterator[str]:
    match other.kind:
        case "one device":
            yield _against_one_device(plan, other)
        case "data parallel":
            yield _against_data_parallel(plan, other)
        case "runner-up" if _differs(other, plan):
            fits = "" if other.fits else ", but does not fit"
            yield f"Predicted: the best other plan ({other.name}) takes {_times(other, plan)} the time{fits}."
        case "plan" | "runner-up" | "variant":
            pass


def _differs(other: Alternative, plan: Alternative) -> bool:
    """Return whether seconds or memory of an alternative are worth a sentence."""
    return abs(other.step_s / plan.step_s - 1) >= NOTICEABLE or other.fits != plan.fits


def _against_one_device(plan: Alternative, one: Alternative) -> str:
    devices, gain = len(plan.peak_bytes), one.step_s / plan.step_s
    if not one.fits:
        return f"Predicted: one device would need {format_bytes(max(one.peak_bytes))}, which does not fit."
    other = " and versions='sync', which trains without late gradients" if plan.difference else ""
    if gain < 1 - UNCERTAIN:
        return f"Predicted: one device fits and takes {_times(one, plan)} the time of this plan: use devices=1{other}."
    if gain < 1 + UNCERTAIN:
        as_fast = f"about as fast ({_times(one, plan)} the time)"
        return f"Predicted: one device fits and is {as_fast}: consider devices=1{other}."
    why = ""
    if gain < devices:
        why = f"; {_why_not(plan)}"
    elif gain > devices * (1 + NOTICEABLE):
        why = "; more than linear, because smaller parts run faster or other work disturbed the measurements"
    share = format_share(gain / devices, 0)
    return f"Predicted speed-up on {devices} devices: {_times(one, plan)} ({share} of linear){why}."


def _why_not(plan: Alternative) -> str:
    if plan.stages == 1:
        return "the rest goes to gradient all-reduce and the optimizer step"
    if plan.bubble < NOTICEABLE:
        return "uneven stages, the runtime and the links take the rest"
    return f"the bubble is {format_share(plan.bubble, 0)}, at both ends of the step or while ranks wait for each other"


def _against_data_parallel(plan: Alternative, replicas: Alternative) -> str:
    ratio, times = replicas.step_s / plan.step_s, _times(replicas, plan)
    if plan.stages == 1:
        if ratio < 1 - UNCERTAIN:
            return f"Predicted: data parallel training on whole batches takes {times} the time: set microbatches=1."
        return "This is data parallel training: every device holds the whole model."
    if not replicas.fits:
        needed = format_bytes(max(replicas.peak_bytes))
        return f"Predicted: data parallel training does not fit; every device would need {needed}."
    if ratio < 1 - UNCERTAIN:
        return (
            f"Predicted: data parallel training fits and takes {times} the time. Leave out layout, schedule and plan: "
            "then it is chosen, if the step allows it."
        )
    if ratio < 1 + UNCERTAIN:
        return f"Predicted: data parallel training fits and is about as fast ({times} the time)."
    sent = f"sends {format_bytes(replicas.bytes_sent)} per step instead of {format_bytes(plan.bytes_sent)}"
    return f"Predicted: data parallel training takes {times} the time and {sent}."


def _microbatches(plan: Alternative, variants: Sequence[Alternative]) -> Iterator[str]:
    """Yield sentences on the next smaller and the next larger number of micro-batches that was evaluated."""
    ordered = sorted(variants, key=lambda variant: variant.microbatches)
    fewer = [variant for variant in ordered if variant.microbatches < plan.microbatches][-1:]
    more = [variant for variant in ordered if variant.microbatches > plan.microbatches][:1]
    for variant in (*fewer, *more):
        if _differs(variant, plan):
            counts = f"{variant.microbatches} micro-batches instead of {plan.microbatches}"
            bubbles = f"{format_share(variant.bubble, 0)} instead of {format_share(plan.bubble, 0)}"
            fits = "" if variant.fits else ", which does not fit"
            yield f"Predicted: {counts} take {_times(variant, plan)} the time, with a bubble of {bubbles}{fits}."


def time_sentences(timeline: Timeline, word: Literal["Predicted", "Measured"]) -> Iterator[str]:
    """Yield sentences on how ranks spend their time, and on the rank that computes longest if the cut is uneven.

    Args:
        timeline: a step, simulated or recorded.
        word: which of them it is.
    """
    by_rank = accounts(timeline)
    parts = [f"{format_share(share, 0)} {activity}" for activity, share in _shares(by_rank) if share >= NOTICEABLE]
    if parts:
        yield f"{word}: ranks spend {', '.join(parts)}."
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


def _shares(by_rank: Sequence[Account]) -> list[tuple[str, float]]:
    """Return what share of the time of all ranks goes where, largest first."""
    seconds = {
        "computing": sum(sum(account.computes.values()) for account in by_rank),
        "waiting for other stages": sum(account.drain + sum(gap.late for gap in account.gaps) for account in by_rank),
        "waiting for messages": sum(gap.transfer for account in by_rank for gap in account.gaps),
        "waiting for offloaded activations": sum(gap.swap for account in by_rank for gap in account.gaps),
        "on overhead between passes": sum(gap.overhead for account in by_rank for gap in account.gaps),
        "waiting for gradient all-reduce": sum(account.reduction for account in by_rank),
        "in the optimizer": sum(account.optimizer for account in by_rank),
    }
    total = sum(seconds.values()) or 1.0
    return sorted(((what, part / total) for what, part in seconds.items()), key=lambda share: -share[1])


def _range(amounts: Sequence[int]) -> str:
    least, most = format_bytes(min(amounts)), format_bytes(max(amounts))
    return most if least == most else f"{least} to {most}"


def _times(other: Alternative, plan: Alternative) -> str:
    return f"{other.step_s / plan.step_s:.2f}x"


def alternatives_table(alternatives: Sequence[Alternative], *, width: int = WIDTH) -> str:
    """Return the alternatives as a table, with seconds as ratios to those of the plan."""
    return text_of(alternatives_grid(alternatives), width)


def alternatives_grid(alternatives: Sequence[Alternative]) -> Table:
    """Return the table of `alternatives_table`, to be printed or written as HTML."""
    plan, _ = _plan_and_others(alternatives)
    table = Table(box=box.SIMPLE, title="Predicted", title_justify="left")
    table.add_column("", overflow="fold")
    for heading in ("step", "ratio", "bubble", "peak per device", "sent per step", "fits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for other in alternatives:
        table.add_row(
            other.name,
            format_seconds(other.step_s),
            f"{other.step_s / plan.step_s:.2f}",
            format_share(other.bubble),
            _range(other.peak_bytes),
            format_bytes(other.bytes_sent),
            "yes" if other.fits else "no",
        )
    return table
