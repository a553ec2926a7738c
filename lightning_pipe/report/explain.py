"""Summary of a plan: advice, what other plans gain and cost, and how ranks spend their time.

All times are predictions of the same simulator, so every sentence begins with "Predicted"; sentences on a recorded step
begin with "Measured". The summary is as ready to advise against a pipeline as for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Literal

from rich import box
from rich.table import Table

from lightning_pipe.core.timeline import Timeline
from lightning_pipe.report.account import Account, accounts
from lightning_pipe.report.advice import NOTICEABLE, Alternative, PlanSituation, advice, bottleneck_sentence, times_of
from lightning_pipe.report.table import WIDTH, text_of, wrapped
from lightning_pipe.units import format_bytes, format_seconds, format_share


def explain(
    alternatives: Sequence[Alternative], *, timeline: Timeline, chosen: Set[str] = frozenset(), width: int = WIDTH
) -> str:
    """Return the summary of a plan: sentences, and a table of the alternatives.

    Args:
        alternatives: exactly one of kind "plan", and any others, on the same batch.
        timeline: the plan's simulated step.
        chosen: names of the options that the user has set.
        width: characters per line.
    """
    summary = (wrapped(text, width) for text in sentences(alternatives, timeline=timeline, chosen=chosen))
    return "\n".join([*summary, "", alternatives_table(alternatives, width=width)])


def sentences(alternatives: Sequence[Alternative], *, timeline: Timeline, chosen: Set[str] = frozenset()) -> list[str]:
    """Return the sentences of a summary, advice first; arguments as for `explain`."""
    plan, others = _plan_and_others(alternatives)
    every = [
        *filter(None, [plan.difference]),
        *advice(PlanSituation(chosen, "", alternatives, timeline)),
        *(sentence for other in others for sentence in _runner_up(plan, other)),
        *_microbatches(plan, [other for other in others if other.kind == "variant"]),
        *time_sentences(timeline, "Predicted"),
        f"Predicted memory: {_range(plan.peak_bytes)} per device{'' if plan.fits else ', which does not fit'}.",
    ]
    return [*dict.fromkeys(every)]


def _plan_and_others(alternatives: Sequence[Alternative]) -> tuple[Alternative, list[Alternative]]:
    (plan,) = [alternative for alternative in alternatives if alternative.kind == "plan"]
    return plan, [alternative for alternative in alternatives if alternative.kind != "plan"]


def _runner_up(plan: Alternative, other: Alternative) -> Iterator[str]:
    if other.kind == "runner-up" and _differs(other, plan):
        fits = "" if other.fits else ", but does not fit"
        yield f"Predicted: the best other plan ({other.name}) takes {times_of(other, plan)} the time{fits}."


def _differs(other: Alternative, plan: Alternative) -> bool:
    """Return whether seconds or memory of an alternative are worth a sentence."""
    return abs(other.step_s / plan.step_s - 1) >= NOTICEABLE or other.fits != plan.fits


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
            yield f"Predicted: {counts} take {times_of(variant, plan)} the time, with a bubble of {bubbles}{fits}."


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
    yield from bottleneck_sentence(timeline, word)


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
