"""Rounds of a pipeline that is never flushed: all backwards of a batch, and forwards that run ahead of them.

    rank 1 of 4, four micro-batches     F2 B0 F3 B1 F4 B2 F5 B3 | F2 B0 ...      F4, F5 belong to the next batch

Rounds are cut by backwards, so that the optimizer steps last in every round. After Narayanan et al., "PipeDream" (SOSP
2019), section 3.2 (1F1B), with several micro-batches a batch as in "PipeDream-2BW" (ICML 2021), figure 3.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.core.program import Compute, Layout, Order, Seam
from lightning_pipe.errors import ProgramError
from lightning_pipe.schedule.construct.merge import stages_by_rank


def seam_of(
    ahead: Sequence[int], *, batch: int, enters: Sequence[int], following: int, work: tuple[str, ...] = ()
) -> Seam:
    """Return the seam of a round.

    Args:
        ahead: by stage, how many micro-batches forwards are ahead of backwards; never more on a later stage.
        batch: micro-batches of its batch.
        enters: forwards of each stage that ran in earlier rounds.
        following: micro-batches of the batches that are known to follow.
        work: codes of the own work that chooses weights.
    """
    return Seam(batch, tuple(enters), tuple(min(depth, following) for depth in ahead), work)


def rolling(layout: Layout, seam: Seam, ahead: Sequence[int]) -> Order:
    """Order the computes of a round.

    Args:
        layout: one stage per rank, with any replicas.
        seam: what the round takes over and leaves.
        ahead: as of `seam_of`.

    Raises:
        ProgramError: if a rank holds several stages.
    """
    ranks = stages_by_rank(layout)
    if any(len(stages) > 1 for stages in ranks):
        raise ProgramError(f"found layout {layout.stages}; rounds that run ahead need one stage per rank")
    lines = [tuple(_line(stage, depth, seam)) for stage, depth in enumerate(ahead)]
    return tuple(lines[stages[0]] if stages else () for stages in ranks)


def _line(stage: int, depth: int, seam: Seam) -> list[Compute]:
    line: list[Compute] = []
    forward = seam.enters[stage]
    for microbatch in range(seam.batch):
        while forward < seam.batch + seam.leaves[stage] and forward <= microbatch + depth:
            line.append(Compute(stage, "F", forward))
            forward += 1
        line.append(Compute(stage, "B", microbatch))
    return line
