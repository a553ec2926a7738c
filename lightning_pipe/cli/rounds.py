"""Weight versions on the command line: two rounds drawn, with the version that every pass reads, and a sentence.

rank 1 of 4, 2bw    F4/1: the forward of micro-batch 4 reads version 1, counted from the oldest that is drawn
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_pipe.core.program import Compute, Layout, VerifiedProgram
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.planner.evaluation.evaluate import Judged
from lightning_pipe.planner.evaluation.rounds import VersionsRead, middle_round, versions_read
from lightning_pipe.report import draw
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import order_of
from lightning_pipe.schedule.rounds import all_rounds, delays_of
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import POLICIES, WeightPolicy, same_as
from lightning_pipe.simulator import UnitPrices, period, simulate
from lightning_pipe.simulator.ahead import rounds_ahead

_EVEN = 4  # full rounds before those that are drawn


def drawn_rounds(name: str, layout: Layout, microbatches: int, prices: UnitPrices) -> str:
    """Return what a policy costs on equal devices, and two of its rounds.

    Args:
        name: of the policy.
        layout: one stage per device.
        microbatches: of a batch.
        prices: of the computes and messages.
    """
    policy, sizes, traffic = POLICIES[name], (1,) * microbatches, chain(len(layout.stages))
    program = middle_round(policy, layout, sizes=sizes, traffic=traffic)
    flushed = order_of("1f1b", layout=layout, microbatches=microbatches)
    flush_s = simulate(verify(lower(flushed, layout=layout, sizes=sizes, traffic=traffic)), prices).makespan
    first, last, rounds = _middles(policy, layout, sizes)
    timelines = list(rounds_ahead(rounds, prices))[first : last + 1]
    events = (e for number, timeline in enumerate(timelines) for e in _passes(timeline, number * microbatches))
    shortest = min(x for x in (prices.forward, prices.input_grad, prices.weight_grad) if x > 0)
    lives, delays = policy.lives(layout, microbatches), delays_of(policy, len(layout.stages), microbatches)
    predicted = f", {policy.predicted} of them predicted or corrected" if policy.predicted else ""
    twin = f" (the same policy as {other})" if (other := same_as(name)) else ""
    return (
        f"{name}{twin}: {period(program, prices):.4g} s a round, {period(program, prices, together=True):.4g} s with "
        f"clipping by norm, {flush_s:.4g} s with a flush (1f1b)\n"
        f"updates behind, by device: {_numbers(delays)}; versions of the weights: {_numbers(lives)}{predicted}\n"
        + draw(Timeline(tuple(events)), unit=shortest, notes=versions_read(rounds, policy, first, last))
    )


def notes_of(judged: Judged) -> VersionsRead | None:
    """Return which version every pass of a planned round reads; None for a pipeline that is flushed."""
    if judged.policy is None:
        return None
    sizes = judged.program.sizes[: judged.program.batch]
    first, _, rounds = _middles(judged.policy, judged.plan.layout, sizes)
    return versions_read(rounds, judged.policy, first, first)


def _middles(policy: WeightPolicy, layout: Layout, sizes: tuple[int, ...]) -> tuple[int, int, list[VerifiedProgram]]:
    """Return the numbers of two full rounds in a row, and all rounds around them."""
    filling = -(-max(policy.ahead(layout, len(sizes))) // len(sizes))
    first = filling + _EVEN
    traffic = chain(len(layout.stages))
    rounds = all_rounds(policy, layout, sizes=sizes, traffic=traffic, batches=first + 2 + filling)
    return first, first + 1, rounds


def _passes(timeline: Timeline, begin: int) -> Iterator[Event]:
    """Yield the computes of a round, their micro-batches numbered from another one."""
    for event in timeline.events:
        if isinstance(compute := event.instruction, Compute):
            yield replace(event, instruction=replace(compute, microbatch=compute.microbatch + begin))


def _numbers(numbers: tuple[int, ...] | list[int]) -> str:
    return " ".join(map(str, numbers))
