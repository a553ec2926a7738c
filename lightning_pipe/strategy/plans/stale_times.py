"""Kept measurements that a run has shown to be wrong: they are dropped, and measured again at the next start.

Times of a busy machine that were kept all the same (`profiler.processor_time`) show when a run takes much less than
they predict. Only the one direction is telling: ranks that share cores take longer together than operations do alone,
but never less. Messages and sums are judged in both directions, as networks change both ways.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from lightning_pipe.lightning_names import rank_zero_info
from lightning_pipe.profiler.cache import forget_timings
from lightning_pipe.report.comparison import Comparison
from lightning_pipe.strategy.plans.surroundings import forget_surroundings

log = logging.getLogger(__name__)

TOO_LONG = 1.3  # predicted over measured seconds of all computes
_OFF, _OF_STEP = 2.0, 0.1  # messages and sums take so many times as long or short, and that is this share of the step


def _is_network_off(comparison: Comparison) -> bool:
    figures = [*(stage.transfer for stage in comparison.stages), *(rank.reduction for rank in comparison.ranks)]
    fewer, more = sorted((sum(f.predicted for f in figures), sum(f.measured for f in figures)))
    return more > _OFF * fewer and more - fewer > _OF_STEP * comparison.step.measured * max(1, len(comparison.ranks))


def forget_stale_times(comparison: Comparison, *, cache: Path | None, device: torch.device) -> None:
    """Let the next start measure again, and say so, if computes took much less than predicted, or messages otherwise.

    Args:
        comparison: of the first steps.
        cache: where times are kept; None if they are not.
        device: of this rank.
    """
    if cache is None:
        return
    if _is_network_off(comparison) and forget_surroundings(cache):
        log.info("Messages and sums took otherwise than predicted; the next start measures links again.")
    figures = [figure for stage in comparison.stages for figure in stage.computes.values()]
    predicted, measured = sum(f.predicted for f in figures), sum(f.measured for f in figures)
    if not measured or predicted < TOO_LONG * measured:
        return
    forget_surroundings(cache)
    if forget_timings(cache, device):
        rank_zero_info(
            f"Computes took {measured / predicted:.0%} of what was predicted from times of their operations, which "
            f"seem to be those of a busy machine. Those kept in {cache} were dropped; the next start "
            "measures again, and may choose a better plan."
        )
