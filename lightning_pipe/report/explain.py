"""Explanation of a plan in plain words: gains and costs against one device, data parallel and other plans.

All times are predictions of the same judge, so only their ratios are worth a sentence. The text is as ready to advise
against a pipeline as for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.table import Table

from lightning_pipe.core.timeline import Timeline
from lightning_pipe.report.account import Account, accounts
from lightning_pipe.report.table import WIDTH, text_of
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


def explain(alternatives: Sequence[Alternative], *, timeline: Timeline, width: int = WIDTH) -> str:
    """Return why a plan was chosen, or should not be used, as a few sentences and a table.

    Args:
        alternatives: exactly one of kind "plan", and any others, on the same batch.
        timeline: the plan's simulated step.
        width: characters per line of the table.
    """
    return "\n".join([*sentences(alternatives, timeline=timeline), "", alternatives_table(alternatives, width=width)])


def sentences(alternatives: Sequence[Alternative], *, timeline: Timeline) -> list[str]:
    """Return all that is worth saying for and against a plan; arguments as for `explain`."""
    plan, others = _plan_and_others(alternatives)
    return [
        *(sentence for other in others for sentence in _against(plan, other)),
        *_microbatches(plan, [other for other in others if other.kind == "variant"]),
        *_losses(timeline),
        _memory(plan),
    ]


def main_sentences(alternatives: Sequence[Alternative], *, timeline: Timeline) -> list[str]:
    """Return the at most three sentences that matter most: against one device, data parallel, and what limits it."""
    plan, others = _plan_and_others(alternatives)
    baselines = [other for other in others if other.kind in ("one device", "data parallel")]
    against = [sentence for other in baselines for sentence in _against(plan, other)]
    return [*against, *list(_losses(timeline))[-1:]]


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
            takes = f"would take {_times(other.step_s / plan.step_s)} the time"
            yield f"Another plan ({other.name}) {takes}{'' if other.fits else ', but does not fit'}."
        case "plan" | "runner-up" | "variant":
            pass


def _differs(other: Alternative, plan: Alternative) -> bool:
    """Return whether there is anything to say about the seconds, or the memory, of another way."""
    return abs(other.step_s / plan.step_s - 1) >= NOTICEABLE or other.fits != plan.fits


def _against_one_device(plan: Alternative, one: Alternative) -> str:
    devices, gain = len(plan.peak_bytes), one.step_s / plan.step_s
    if not one.fits:
        return f"One device is too small: it would need {format_bytes(max(one.peak_bytes))}."
    if gain < 1 - UNCERTAIN:
        return f"One device is enough, and predicted to take {_times(gain)} the time of this plan: use devices=1."
    if gain < 1 + UNCERTAIN:
        return f"One device is enough, and predicted to be about as fast ({_times(gain)} the time): consider devices=1."
    why = ""
    if gain < devices:
        why = f"{devices} devices are not {devices} times as fast: {_why_not(plan)}"
    elif gain > devices * (1 + NOTICEABLE):
        why = "That is more than they can share out: smaller parts are faster, or other work disturbed measurements."
    share = format_share(gain / devices, 0)
    return f"{_times(gain)} as fast as one device, on {devices} ({share} of the ideal). {why}".strip()


def _why_not(plan: Alternative) -> str:
    if plan.stages == 1:
        return "sums of gradients and the optimizer step take their share."
    if plan.bubble < NOTICEABLE:
        return "stages are uneven, or the runtime and the links take their share."
    idle = format_share(plan.bubble, 0)
    return f"ranks are idle for {idle} of their span, at both ends of the step or waiting for each other."


def _against_data_parallel(plan: Alternative, replicas: Alternative) -> str:
    ratio = replicas.step_s / plan.step_s
    if plan.stages == 1:
        already = "This is data parallel training: every device holds the whole model"
        if ratio < 1 - UNCERTAIN:
            return f"{already}. On whole batches it is predicted to take {_times(ratio)} the time: set microbatches=1."
        return f"{already}."
    if not replicas.fits:
        return f"Data parallel training does not fit: every device would need {format_bytes(max(replicas.peak_bytes))}."
    if ratio < 1 - UNCERTAIN:
        return (
            f"Data parallel training fits, and is predicted to take {_times(ratio)} the time: a pipeline is the wrong "
            "choice here. Use strategy='ddp', or leave out layout and schedule: then it is chosen, if the step allows "
            "it."
        )
    if ratio < 1 + UNCERTAIN:
        return f"Data parallel training fits, and is predicted to be about as fast ({_times(ratio)} the time)."
    sent = f"it sends {format_bytes(replicas.bytes_sent)} per step instead of {format_bytes(plan.bytes_sent)}"
    return f"Data parallel training is predicted to take {_times(ratio)} the time; {sent}."


def _microbatches(plan: Alternative, variants: Sequence[Alternative]) -> Iterator[str]:
    """Yield sentences on the next smaller and the next larger number of micro-batches that was evaluated."""
    ordered = sorted(variants, key=lambda variant: variant.microbatches)
    fewer = [variant for variant in ordered if variant.microbatches < plan.microbatches][-1:]
    more = [variant for variant in ordered if variant.microbatches > plan.microbatches][:1]
    for variant in (*fewer, *more):
        if not _differs(variant, plan):
            continue
        amount = "more" if variant.microbatches > plan.microbatches else "fewer"
        yield (
            f"With {amount} micro-batches ({variant.microbatches} instead of {plan.microbatches}) the bubble would be "
            f"{format_share(variant.bubble, 0)} instead of {format_share(plan.bubble, 0)}, and the step take "
            f"{_times(variant.step_s / plan.step_s)} the time{'' if variant.fits else '; that does not fit'}."
        )


def _losses(timeline: Timeline) -> Iterator[str]:
    """Yield sentences on what the ranks spend their time on, and on which of them computes longest."""
    found = accounts(timeline)
    shares = _shares(found)
    parts = [f"{format_share(share, 0)} {what}" for what, share in shares if share >= NOTICEABLE]
    if parts:
        yield f"The ranks spend {', '.join(parts)}."
    busy = [sum(account.computes.values()) for account in found]
    mean = sum(busy) / len(busy) if busy else 0.0
    if mean and max(busy) > UNEVEN * mean:
        slowest = found[busy.index(max(busy))]
        stages = sorted({stage for stage, _ in slowest.computes})
        holds = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
        yield (
            f"Rank {slowest.rank} ({holds}) sets the pace: it computes {format_seconds(max(busy))}, "
            f"{max(busy) / mean:.2f} times the mean."
        )


def _shares(found: Sequence[Account]) -> list[tuple[str, float]]:
    """Return what share of the time of all ranks goes where, largest first."""
    seconds = {
        "computing": sum(sum(account.computes.values()) for account in found),
        "waiting for other stages": sum(account.drain + sum(gap.late for gap in account.gaps) for account in found),
        "waiting for messages on their way": sum(gap.transfer for account in found for gap in account.gaps),
        "waiting for what was offloaded": sum(gap.swap for account in found for gap in account.gaps),
        "on overhead between computes": sum(gap.overhead for account in found for gap in account.gaps),
        "waiting for sums of gradients": sum(account.reduction for account in found),
        "in the optimizer": sum(account.optimizer for account in found),
    }
    total = sum(seconds.values()) or 1.0
    return sorted(((what, part / total) for what, part in seconds.items()), key=lambda share: -share[1])


def _memory(plan: Alternative) -> str:
    needed = _range(plan.peak_bytes)
    return f"It needs {needed} per device{'' if plan.fits else ', which does not fit'}."


def _range(amounts: Sequence[int]) -> str:
    least, most = format_bytes(min(amounts)), format_bytes(max(amounts))
    return most if least == most else f"{least} to {most}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times"


def alternatives_table(alternatives: Sequence[Alternative], *, width: int = WIDTH) -> str:
    """Return the alternatives as a table, with seconds as ratios to those of the plan."""
    plan, _ = _plan_and_others(alternatives)
    table = Table(box=box.SIMPLE)
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
    return text_of(table, width)
