"""Processor time of a thread, which says whether other work has taken a part of the processor.

While operations are timed, the thread that times them runs all the time unless others take its core. Times that were
measured under load are kept apart, for starts under load: the next start without load measures again.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import torch

_LOOK_S = 0.05  # how long a thread runs to see whether it gets a core
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


def is_loaded(*, ranks: int, device: torch.device) -> bool:
    """Return whether other work takes a part of the processor now.

    Args:
        ranks: that look on this host at the same time.
        device: on which operations would be timed.
    """
    used = ProcessorTime()
    while time.perf_counter() < used.wall_s + _LOOK_S:
        pass
    return used.is_short(ranks=ranks, device=device)
