"""Offload budget: the bytes that a rank can copy to its host and back without waiting, between F and I.

After Capuchin (Peng et al., ASPLOS 2020), where a tensor is swapped for free while

    Free Time = start of I - end of F - 2 x copy >= 0

with one copy at a time in each direction. In a pipeline that distance is that of the same micro-batch, about (K - 1)
periods for K micro-batches in flight, and every period brings one copy in each direction. Here both follow from walking
the two lanes along a timeline, as `simulator` does. Left out: the posting of messages between a compute and a copy, and
copies of other ranks of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipe.core.program import Compute
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.schedule.lower.offload import AHEAD

_HALVINGS = 50


@dataclass(frozen=True)
class Stay:
    """The time for which what a stage saves of one micro-batch lies idle on a rank.

    Attributes:
        begin: end of F, from when it can be copied away.
        asked: when the way back is posted.
        end: start of I.
    """

    begin: float
    asked: float
    end: float


def stays(timeline: Timeline, rank: int) -> list[Stay]:
    """Return the stays of all micro-batches on a rank, in the order in which they end.

    In a round, what earlier rounds left lies idle from its begin, and what it leaves until its end.
    """
    computes = timeline.computes(rank)
    forwards: dict[tuple[int, int], float] = {}
    found = []
    for number, event in enumerate(computes):
        compute = event.instruction
        if not isinstance(compute, Compute):
            continue
        work = (compute.stage, compute.microbatch)
        if compute.kind == "F":
            forwards[work] = event.end
        elif compute.direction == "B":
            before = number - AHEAD - 1  # the compute at whose end the way back is posted
            begin = forwards.pop(work, computes[0].start)
            posted = computes[before].end if before >= 0 else begin
            found.append(Stay(begin, max(posted, begin), event.start))
    return [*found, *(Stay(begin, computes[-1].end, computes[-1].end) for begin in forwards.values())]


@dataclass(frozen=True)
class AwayInterval:
    """When the bytes of a stay are not on the device: from `begin` to `end`; they are complete again at `ready`."""

    begin: float
    end: float
    ready: float


def absences(found: Sequence[Stay], copy_s: float) -> list[AwayInterval]:
    """Return what copies of `copy_s` seconds each way make of stays, in their order: one at a time per direction."""
    away: dict[int, float] = {}
    free = 0.0
    for i in sorted(range(len(found)), key=lambda i: found[i].begin):
        free = away[i] = max(found[i].begin, free) + copy_s
    back, free = [], 0.0
    for i, stay in enumerate(found):
        start = max(stay.asked, away[i], free)
        free = start + copy_s
        back.append(AwayInterval(away[i], start, free))
    return back


def free_copy_s(found: Sequence[Stay]) -> float:
    """Return the longest copy for which no I has to wait."""
    low, high = 0.0, max((stay.end - stay.begin for stay in found), default=0.0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        is_free = all(a.ready <= stay.end for a, stay in zip(absences(found, middle), found, strict=True))
        low, high = (middle, high) if is_free else (low, middle)
    return low
