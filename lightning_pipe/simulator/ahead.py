"""Step time of ranks that run ahead: from step to step, once steps follow each other evenly.

Every rank steps when its own gradients are complete, and begins the next batch at once. So a rank that began a batch
early ends it early, and the time of a step is no longer that from the first begin to the last end: zero-bubble
schedules then take as long as one device computes (Qi et al. 2023, section 4).

    rank 0 | F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3       ZB-H2, 4 micro-batches:
    rank 1 |  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3    12 instead of 13 units

Where the program has a `Confirm` before its first backward, a rank waits there until all ranks have ended the step
before. The first micro-batch has gone through all stages by then, so most ranks wait for nothing.

Rounds of a pipeline that is never flushed (`core.program.Seam`) follow each other in the same way. There a message may
be taken in a later round than it arrives in. Where gradients are clipped by their norm, all ranks step together: the
norm is known when the last of them has all its gradients.

    p = 4, 8 micro-batches    24 units a round, 27 with clipping by norm, 30 with a flush
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_pipe.core.prices import Cards, Prices
from lightning_pipe.core.program import AnyCompute, Recv, Step, VerifiedProgram
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.simulator.simulate import Use, simulate

_ROUNDS = 8  # steps after which they are even enough; of rounds, as many more as there are ranks
_EVEN = 1e-9  # relative difference between steps that are even


def steps_ahead(program: VerifiedProgram, prices: Prices, steps: int) -> Iterator[Timeline]:
    """Yield the timelines of steps that follow each other, each rank going on as soon as it has stepped.

    Args:
        program: what runs in every step; one that steps.
        prices: what it costs.
        steps: how many.
    """
    yield from rounds_ahead([program] * steps, prices)


def rounds_ahead(
    rounds: Iterable[VerifiedProgram], prices: Prices, *, cards: Cards | None = None, together: bool = False
) -> Iterator[Timeline]:
    """Yield the timelines of programs that follow each other, each rank going on as soon as it has stepped.

    Args:
        rounds: programs that step; of a pipeline that is never flushed, each takes over what the one before left.
        prices: what they cost.
        cards: as of `simulate`.
        together: whether ranks step together, as where gradients are clipped by norm.
    """
    begins: Sequence[float] | None = None
    arrived: dict[Use, float] = {}
    for program in rounds:
        start = begins or (0.0,) * len(program.ranks)
        timeline = simulate(program, prices, begins=start, cards=cards, arrived=arrived, together=together)
        yield timeline
        begins, arrived = ends(timeline), _crossing(timeline, program, arrived)


def _crossing(timeline: Timeline, program: VerifiedProgram, arrived: dict[Use, float]) -> dict[Use, float]:
    """Return when the messages arrive that later rounds take, numbered as in the next."""
    if program.seam is None:
        return {}
    moved: dict[Use, float] = {
        (event.rank, x.message.target, x.message.direction, x.message.microbatch): event.end
        for event in timeline.events
        if isinstance(x := event.instruction, Recv)
    }
    return {
        (rank, stage, direction, m - program.batch): end
        for (rank, stage, direction, m), end in (arrived | moved).items()
        if direction == "F" and m >= program.batch and not program.runs(stage, "F", m)
    }


def ends(timeline: Timeline) -> tuple[float, ...]:
    """Return when each rank has stepped."""
    found = {event.rank: event.end for event in timeline.events if isinstance(event.instruction, Step)}
    return tuple(found[rank] for rank in sorted(found))


def steady_step(
    program: VerifiedProgram, prices: Prices, *, cards: Cards | None = None, together: bool = False
) -> Timeline:
    """Return the timeline of one of many equal steps, once they are even; its `since` is the end of the one before.

    Args:
        program: what runs in every step, such as a round in the middle of many.
        prices: what it costs.
        cards: as of `simulate`.
        together: as of `rounds_ahead`.
    """
    working = [rank for rank, line in enumerate(program.ranks) if any(isinstance(x, AnyCompute) for x in line)]
    most = _ROUNDS + (0 if program.seam is None else len(working))
    stepped = [0.0] * len(working)
    for number, timeline in enumerate(rounds_ahead([program] * most, prices, cards=cards, together=together)):
        last, stepped = stepped, [ends(timeline)[rank] for rank in working]
        lasted = [end - start for start, end in zip(last, stepped, strict=True)]
        if number and max(lasted) - min(lasted) <= _EVEN * (max(stepped) - max(last)):
            break
    return replace(timeline, since=max(last))


def with_entering(timeline: Timeline, program: VerifiedProgram) -> Timeline:
    """Return an even round as it is recorded: with the receives that it takes, in the place of those that it posts.

    Args:
        timeline: of a round in the middle of many (`steady_step`).
        program: of the round; what it posts for later ones comes, a period earlier, from the rounds before.
    """
    seam = program.seam
    if seam is None:
        return timeline
    lasts_s = max(ends(timeline)) - timeline.since

    def taken(event: Event) -> Event:
        if not isinstance(receive := event.instruction, Recv) or receive.message.direction == "B":
            return event
        message, rounds = receive.message, 0
        while not seam.runs(message.target, "F", message.microbatch - rounds * seam.batch):
            rounds += 1
        message = replace(message, microbatch=message.microbatch - rounds * seam.batch)
        earlier_s = rounds * lasts_s
        return Event(event.rank, replace(receive, message=message), event.start - earlier_s, event.end - earlier_s)

    return replace(timeline, events=tuple(map(taken, timeline.events)))


def period(program: VerifiedProgram, prices: Prices, *, together: bool = False) -> float:
    """Return the seconds from the end of a step to the end of the next, once steps are even."""
    timeline = steady_step(program, prices, together=together)
    return max(ends(timeline)) - timeline.since
