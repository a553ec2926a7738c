"""Alpha-beta model of a link: latency and bandwidth fitted to few transfer sizes, within a bounded time.

    seconds(b) = fixed_s + b / bytes_per_s

`fixed_s` is the median time of tiny transfers (the smaller one of two bursts, as something else may have been running
during one of them). The bandwidth follows from one size that takes long enough for clocks
and schedulers not to matter, repeated back to back: the median of b / (seconds(b) - fixed_s). Sizes grow towards it, so
a slow link is never asked for many seconds, and what they send empties the token bucket of a shaped link, which would
let the first bytes pass for nothing.

Where protocols change with the size (NCCL's LL and Simple, messages and parts of sums in memory that ranks share), one
line is wrong between the two sizes. `fit_two_lines` measures a third, and lets a line of their own stand for few bytes:

    seconds(b) = min(few.fixed_s + b / few.bytes_per_s, many.fixed_s + b / many.bytes_per_s)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

ENOUGH_S = 0.01  # a transfer that takes so long is measured well
MOST_BYTES = 64 * 2**20  # more than any message of a usual pipeline; a link that is faster still is measured well too
_TINY_BYTES = 8
_FIRST_BYTES = 64 * 2**10
_GROWTH = (2.0, 8.0)  # of the size from trial to trial; at most so much, for the first bytes of a bucket deceive
_WARM_UPS = 3  # the first transfers set connections up
_TINY_TRIPS = 15
_TRIPS = (3, 7)  # at the final size, as many as fit into
_TRIPS_S = 0.05
_MIDDLE = 16  # the size between is so much smaller than the largest
_LEAST_SHARE = 0.1  # of a large transfer's time is due to its size, whatever noise says


@dataclass(frozen=True)
class AlphaBeta:
    """Seconds of a transfer as a line over its bytes."""

    fixed_s: float
    bytes_per_s: float


def fit_line(seconds: Callable[[int], float]) -> AlphaBeta:
    """Return the line that explains how long transfers take.

    Args:
        seconds: makes a transfer of so many bytes (a multiple of 8) and returns how long it took.
    """
    return _fit(seconds, MOST_BYTES)[0]


def fit_two_lines(seconds: Callable[[int], float], *, most_bytes: int) -> tuple[AlphaBeta, AlphaBeta | None]:
    """Return the line of many bytes and that of few, of which the lower counts; None where one line explains all.

    Args:
        seconds: makes a transfer of so many bytes (a multiple of 8) and returns how long it took.
        most_bytes: of the transfers that are of interest.
    """
    line, count, whole_s, trips = _fit(seconds, most_bytes)
    middle = count // _MIDDLE // 8 * 8
    middle_s = median(seconds(middle) for _ in range(trips))
    many = AlphaBeta(0.0, (count - middle) / max(whole_s - middle_s, _LEAST_SHARE * whole_s))
    many = AlphaBeta(middle_s - middle / many.bytes_per_s, many.bytes_per_s)
    if many.fixed_s <= line.fixed_s:
        return line, None
    return many, AlphaBeta(line.fixed_s, middle / (middle_s - line.fixed_s))


def _fit(seconds: Callable[[int], float], most_bytes: int) -> tuple[AlphaBeta, int, float, int]:
    """Return the line through tiny and large transfers, and of the large ones bytes, seconds and how many were made."""
    for _ in range(_WARM_UPS):
        seconds(_TINY_BYTES)
    first_s = median(seconds(_TINY_BYTES) for _ in range(_TINY_TRIPS))
    count, last_s = _long_enough(seconds, first_s, most_bytes)
    least, most = _TRIPS
    trips = min(max(round(_TRIPS_S / max(last_s, first_s)), least), most)
    whole_s = median(seconds(count) for _ in range(trips))
    fixed_s = min(first_s, median(seconds(_TINY_BYTES) for _ in range(_TINY_TRIPS)))
    line = AlphaBeta(fixed_s, count / max(whole_s - fixed_s, _LEAST_SHARE * whole_s))
    return line, count, whole_s, trips


def _long_enough(seconds: Callable[[int], float], fixed_s: float, most_bytes: int) -> tuple[int, float]:
    """Return a size whose transfer takes long enough (or the largest), and how long it took."""
    count = _FIRST_BYTES
    least, most = _GROWTH
    while True:
        last_s = seconds(count) - fixed_s
        if last_s >= ENOUGH_S or count >= most_bytes:
            return count, last_s
        factor = min(max(ENOUGH_S / max(last_s, ENOUGH_S / most), least), most)
        count = min(int(count * factor) // 8 * 8, most_bytes)
