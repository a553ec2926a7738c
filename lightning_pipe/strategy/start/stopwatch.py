"""Seconds that pass between fit() and the end of the first step, by phase.

    stopwatch.lap("capture")        what has passed since the last lap was capture

Laps leave nothing out, so their sum is the whole time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from lightning_pipe.units import format_seconds

log = logging.getLogger(__name__)

_LONG_S = 3.0  # of a phase that gets a line of its own


class Stopwatch:
    """Measure the phases of one start.

    Args:
        is_running: whether it runs, until it is stopped.
    """

    def __init__(self, *, is_running: bool = True) -> None:
        self.is_running = is_running
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    @property
    def seconds(self) -> Mapping[str, float]:
        """Return the seconds of every phase that has passed, in the order of their first laps."""
        return self._seconds

    def lap(self, phase: str) -> None:
        """Count the seconds since the last lap as part of a phase."""
        if self.is_running:
            now = time.perf_counter()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
            if now - self._last >= _LONG_S:
                log.info("Start: %s took %s.", phase, format_seconds(now - self._last))
            self._last = now

    def stop(self) -> str:
        """Measure no further; return what was measured as a line, "" if that was returned before."""
        if not self.is_running:
            return ""
        self.is_running = False
        parts = (f"{phase} {format_seconds(seconds)}" for phase, seconds in self._seconds.items())
        return f"From the start to the end of the first step: {format_seconds(self.total_s)} ({', '.join(parts)})."

    @property
    def total_s(self) -> float:
        """Return the seconds of all phases together."""
        return sum(self._seconds.values())
