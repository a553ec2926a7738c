"""Times of operations that were measured while the machine was busy with something else: they must not be kept.

While operations are timed, the thread that times them runs all the time unless others take its core, so its processor
time says whether they have. Times that were kept all the same show when a run takes much less than they predict. Only
the one direction is telling: ranks that share cores take longer together than operations do alone, but never less.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lightning_pipe.lightning_names import rank_zero_info
from lightning_pipe.profiler.cache import forget_timings
from lightning_pipe.report.comparison import Comparison

TOO_LONG = 1.3  # predicted over measured seconds of all computes
_LEAST_SHARE = 0.9  # of the processor time that this thread would have had without other work


@dataclass(frozen=True)
class ProcessorTime:
    """Processor time of this thread from now on."""

    wall_s: float = field(default_factory=time.perf_counter)
    used_s: float = field(default_factory=time.thread_time)

    def is_short(self, *, ranks: int, device: torch.device) -> bool:
        """Return whether other work has taken a part of it, as far as that can be seen.

        Args:
            ranks: that compute on this host at the same time.
            device: on which operations were timed.
        """
        if device.type != "cpu" or not hasattr(os, "sched_getaffinity"):
            return False
        own = min(1.0, len(os.sched_getaffinity(0)) / (ranks * torch.get_num_threads()))
        return time.thread_time() - self.used_s < _LEAST_SHARE * own * (time.perf_counter() - self.wall_s)


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
