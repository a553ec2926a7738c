"""Kept measurements that a run has shown to be wrong: they are dropped, and measured again at the next start.

Times of a busy machine that were kept all the same (`profiler.processor_time`) show when a run takes much less than
they predict. Only the one direction is telling: ranks that share cores take longer together than operations do alone,
but never less. Links are looked at by the next start itself (`surroundings`).
"""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_pipe.lightning_names import rank_zero_info
from lightning_pipe.profiler.cache import forget_timings
from lightning_pipe.report.comparison import Comparison
from lightning_pipe.strategy.plans.surroundings import forget_surroundings

TOO_LONG = 1.3  # predicted over measured seconds of all computes


def forget_stale_times(comparison: Comparison, *, cache: Path | None, device: torch.device) -> None:
    """Let the next start measure again, and say so, if computes took much less than predicted.

    Args:
        comparison: of the first steps.
        cache: where times are kept; None if they are not.
        device: of this rank.
    """
    if cache is None:
        return
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
