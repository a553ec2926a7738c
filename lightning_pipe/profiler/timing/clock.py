"""Device clock: marks that are set in passing and read afterwards.

On the CPU a mark is the time. On CUDA it is an event of the current stream, so what lies between two marks is the time
of the device alone, if the device never waits for the program: before a stretch of calls it gets work that takes longer
than the program needs to queue the stretch. What a stage takes because the program is slower than the device is found
by timing whole stage functions (`profiler.timing.glue`).
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from lightning_pipe.capture.device_streams import finish_stream

_STRETCH = 150  # calls that are queued at once; a queue of CUDA holds about a thousand launches
_QUEUEING_S = 100e-6  # per call, generously: arguments, dispatch, two events
_ROWS = 4096  # of the matrices whose product keeps the device busy


class TimingClock:
    """Set marks on the CPU."""

    def now(self) -> Any:
        """Set a mark."""
        return time.perf_counter()

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, after `finish`."""
        return float(end - start)

    def before(self, call: int) -> None:
        """Prepare for the call of this number."""

    def finish(self) -> None:
        """Wait until the device has reached all marks."""


class CudaTimingClock(TimingClock):
    """Set marks on a CUDA device.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._matrix = torch.zeros(_ROWS, _ROWS, device=device)
        self._product = torch.empty_like(self._matrix)
        self._keep_busy()
        start = self.now()
        self._keep_busy()
        end = self.now()
        self.finish()
        self._products = math.ceil(_STRETCH * _QUEUEING_S / max(self.between(start, end), 1e-6))

    def now(self) -> Any:
        """Set a mark."""
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, after `finish`."""
        return float(start.elapsed_time(end)) / 1e3

    def before(self, call: int) -> None:
        """Give the device work for as long as queueing the next stretch takes."""
        if call % _STRETCH == 0:
            self.finish()
            for _ in range(self._products):
                self._keep_busy()

    def finish(self) -> None:
        """Wait until the device has reached all marks."""
        finish_stream(self._device)

    def _keep_busy(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._product)


def clock_of(device: torch.device) -> TimingClock:
    """Return the clock of a device."""
    return CudaTimingClock(device) if device.type == "cuda" else TimingClock()
