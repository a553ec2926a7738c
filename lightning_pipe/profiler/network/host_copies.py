"""The link between the memory of a device and that of its host: measured by copies out and back."""

from __future__ import annotations

from collections.abc import Callable

from lightning_pipe.core.cluster import Link
from lightning_pipe.profiler.network.alpha_beta import fit_line


def measure_swap(seconds: Callable[[int], float]) -> Link:
    """Return the link of one direction, from copies that go out and come back; takes about 0.1 s.

    Args:
        seconds: copies so many bytes out and back, one after the other, and returns how long that took.
    """
    line = fit_line(seconds)
    return Link(line.fixed_s / 2, 2 * line.bytes_per_s)
