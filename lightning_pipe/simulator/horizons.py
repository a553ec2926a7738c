"""Horizons counted from rounds: how many updates a stage makes before the backward of a batch begins on the first one.

Chen et al., "SpecTrain" (2018), and Guan et al., "XPipe" (2019), give closed forms where F takes as long as B, and
messages take no time (`schedule.weights.until_first_backward`).
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.core.prices import Prices
from lightning_pipe.core.program import Compute, Step, VerifiedProgram
from lightning_pipe.simulator.ahead import rounds_ahead

_SAME = 1e-9  # of a moment


def counted_horizons(rounds: Sequence[VerifiedProgram], prices: Prices, batch: int) -> tuple[tuple[int, int], ...]:
    """Return by stage how many updates it makes after the first F of a batch, and after its first I.

    Args:
        rounds: programs that follow each other, from an empty pipeline on, of one rank per stage.
        prices: what they cost.
        batch: number of the batch.
    """
    began: dict[Compute, float] = {}
    stepped: list[tuple[int, float]] = []
    number = 0
    for program, timeline in zip(rounds, rounds_ahead(rounds, prices), strict=True):
        for event in timeline.events:
            match event.instruction:
                case Compute(stage, kind, microbatch):
                    began[Compute(stage, kind, number + microbatch)] = event.start
                case Step():
                    stepped.append((event.rank, event.end))
        number += program.batch
    first = sum(program.batch for program in rounds[:batch])
    begins = began[Compute(0, "I", first)]
    return tuple(
        (
            _steps(stepped, rank, after=began[Compute(stage, "F", first)], until=begins),
            _steps(stepped, rank, after=began[Compute(stage, "I", first)], until=begins),
        )
        for stage, (rank, *_) in enumerate(rounds[0].layout.stages)
    )


def _steps(stepped: Sequence[tuple[int, float]], rank: int, *, after: float, until: float) -> int:
    return sum(of == rank and after + _SAME < end < until - _SAME for of, end in stepped)
