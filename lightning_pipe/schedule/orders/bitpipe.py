"""BitPipe: two V-shaped pipes in opposite directions (after Wu, Chen and Yu 2024, arXiv 2410.19367).

Chimera with two stages per device and pipe: half the bubble, the same weights and activations in all, and twice the
messages. The order of a unit of p micro-batches, and the sequence of units, come from the authors' code
(github.com/wuhouming/BitPipe, `bitpipe_schedule.py`).

Legend: d device, p devices, h = p/2, r = min(d, p-1-d). Home is the pipe that enters the row on the side of the device,
away is the other; leg 0 and 1 are the first and second stage of a pipe on the device. With n0 micro-batches of the home
pipe to take before the first of the other arrives, n1 = h - n0:

    forwards of a unit     home 0 x n0, (away 0, home 0) x n1, (away 0, away 1) x n0, (home 1, away 1) x n1, home 1 x n0
    backwards of a unit    the same with legs 0 and 1 exchanged, and first what comes last:
                           home 1 x n0, (away 1, home 1) x n1, (away 1, away 0) x n0, (home 0, away 0) x n1, home 0 x n0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeAlias

from lightning_pipe.core.program import Compute, Layout, Options, Order, Pass
from lightning_pipe.schedule.construct.device_orders import order_of_devices, padded, without_padding
from lightning_pipe.schedule.construct.layout_shapes import both_ways, row_of
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS, PASSES

Turn: TypeAlias = tuple[bool, int]  # whether it is the home pipe's, and its leg
CHUNKS = 2


def bitpipe(layout: Layout, microbatches: int, options: Options = NO_OPTIONS, /) -> Order:
    """Order the computes of two opposite V-shaped pipes.

    Four devices and four micro-batches, one unit for each of F, I and W; even micro-batches go down, odd ones up:

        0 | 0F0 0F2   . 3F1 4F1 3F3 4F3 7F0 7I0 7W0 7F2 7I2 7W2 4I1 4W1 3I1 3W1 4I3 4W3 3I3 3W3 0I0 0W0   . 0I2 0W2
        1 |   . 1F0 2F1 1F2 2F3 5F1 6F0 5F3 6F2 6I0 6W0 5I1 5W1 6I2 6W2 5I3 5W3 2I1 2W1 1I0 1W0 2I3 2W3 1I2 1W2
        2 |   . 1F1 2F0 1F3 2F2 5F0 6F1 5F2 6F3 6I1 6W1 5I0 5W0 6I3 6W3 5I2 5W2 2I0 2W0 1I1 1W1 2I2 2W2 1I3 1W3
        3 | 0F1 0F3   . 3F0 4F0 3F2 4F2 7F1 7I1 7W1 7F3 7I3 7W3 4I0 4W0 3I0 3W0 4I2 4W2 3I2 3W2 0I1 0W1   . 0I3 0W3

    Made for multiples of p micro-batches; for other numbers the last unit lacks some.

    Args:
        layout: two stages per device and pipe, in the shape `both_ways`.
        microbatches: number of micro-batches, at least 1.
        options: none are known.

    Raises:
        ConfigError: if an option is unknown, the layout has another shape, or there is no micro-batch.
    """
    read_options(options, schedule="bitpipe", defaults={})
    check_microbatches(microbatches)
    row = row_of(layout, both_ways, schedule="bitpipe", stages_per_device=CHUNKS)
    p = len(row.devices)
    units = padded(microbatches, p) // p
    lines = (_numbered(_passes(p, d, units), p, d, units) for d in range(p))
    return order_of_devices(without_padding(lines, microbatches), row=row)


def _passes(p: int, d: int, units: int) -> list[Pass]:
    """Return forwards and backwards in turn: a unit's first forwards run among the backwards of the unit before."""
    warmup = p + p // 2 + min(d, p - 1 - d)
    rest = 2 * p - warmup  # forwards of a unit that alternate with its own backwards
    turn = warmup - rest + 1
    forward: list[Pass] = ["F"]
    backward: list[Pass] = ["B"]
    both = forward + backward
    between = both * rest + backward * turn + both * (rest - 1) + forward * turn
    return forward * warmup + between * (units - 1) + both * rest + backward * warmup


def _numbered(passes: list[Pass], p: int, d: int, units: int) -> Iterator[Compute]:
    """Yield the computes that take the passes of a device in turn; each stage's in the order of its micro-batches."""
    forwards, backwards = (iter(_turns(p, d, kind) * units) for kind in PASSES)
    is_lower = d >= p // 2
    done: Counter[tuple[Pass, Turn]] = Counter()
    for kind in passes:
        turn = is_home, leg = next(forwards if kind == "F" else backwards)
        pipe = int(is_home == is_lower)  # 0 enters at device 0, 1 at device p-1
        place = p - 1 - d if pipe else d  # along the pipe
        yield Compute(2 * p - 1 - place if leg else place, kind, 2 * done[kind, turn] + pipe)
        done[kind, turn] += 1


def _turns(p: int, d: int, kind: Pass) -> list[Turn]:
    """Return whose turn it is in the forwards or backwards of one unit."""
    half = p // 2
    n0 = half - d if d < half else d - half + 1
    first, second = (0, 1) if kind == "F" else (1, 0)
    return [
        *[(True, first)] * n0,
        *[(False, first), (True, first)] * (half - n0),
        *[(False, first), (False, second)] * n0,
        *[(True, second), (False, second)] * (half - n0),
        *[(True, second)] * n0,
    ]
