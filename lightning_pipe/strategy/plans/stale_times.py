"""Kept times of operations that a run shows to be too long: measured while the machine was busy, most likely.

Only the one direction is telling: ranks that share cores take longer together than operations do alone, but never less.
"""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_pipe.lightning_names import rank_zero_info
from lightning_pipe.profiler.cache import forget_timings
from lightning_pipe.report.comparison import Comparison

TOO_LONG = 1.3  # predicted over measured seconds of all computes


def forget_stale_times(comparison: Comparison, *, cache: Path | None, device: torch.device) -> None:
    """Let operations be measured again at the next start, and say so, if computes took much less than predicted.

    Args:
        comparison: of the first steps.
        cache: where times are kept; None if they are not.
        device: of this rank.
    """
    figures = [figure for stage in comparison.stages for figure in stage.computes.values()]
    predicted, measured = sum(f.predicted for f in figures), sum(f.measured for f in figures)
    if cache is None or not measured or predicted < TOO_LONG * measured:
        return
    if forget_timings(cache, device):
        rank_zero_info(
            f"Computes took {measured / predicted:.0%} of what was predicted from times of their operations, which "
            f"seem to be those of a busy machine. Those kept in {cache} were dropped; the next start "
            "measures again, and may choose a better plan."
        )
