"""DualPipe and DualPipeV: pairs of a forward of one direction and a backward of the other, W where a device would wait.

After DeepSeek-AI (DeepSeek-V3, arXiv 2412.19437, section 3.2.1) and its code (github.com/deepseek-ai/DualPipe,
`dualpipe.py`, `dualpipev.py`). DualPipe runs two pipes in opposite directions, every stage on two devices; DualPipeV
folds them into one V-shaped pipe with one copy of the weights.

The paper runs pairs of F and B as one block whose communication hides behind computing. There is no such block here: F
of a pair runs first, then B. That halves the bubble of computing, since neither result waits for the other compute.

A device knows two streams of micro-batches: phase 0 of its early stage (in the direction, or leg, that starts here) and
phase 1 of its late one. With r its place from the outside, P places and n micro-batches per stream (digits are phases):

    1  F0                     2 (P - r - 1) times
    2  F0 F1                  r + 1
    3  I1 W1 F1               P - r - 1
    4  F0 B1 F1 B0            n - 2 P + r + 1
    5  B1 F1 B0               P - r - 1
    6  B1 B0                  r + 1; of these 2 (r + 1) backwards the second half are I
    7  W I0                   P - r - 1; W in the order of the I
    8  W                      r + 1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from lightning_pipe.core.program import Compute, ComputeKind, Layout, Options, Order
from lightning_pipe.schedule.construct.device_orders import order_of_devices, padded, without_padding
from lightning_pipe.schedule.construct.layout_shapes import both_ways, row_of, zigzag
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS

Action: TypeAlias = tuple[ComputeKind, int]  # with its phase
Stream: TypeAlias = tuple[int, int, int]  # stage, first micro-batch, step to the next

F0: Action = ("F", 0)
F1: Action = ("F", 1)
B0: Action = ("B", 0)
B1: Action = ("B", 1)
I0: Action = ("I", 0)
I1: Action = ("I", 1)
W1: Action = ("W", 1)


def dualpipe(layout: Layout, microbatches: int, options: Options = NO_OPTIONS, /) -> Order:
    """Order the computes of two opposite pipes, pairs as F, then B.

    Four devices and eight micro-batches, one unit for each of F, I and W; even micro-batches go down, odd ones up:

        0 | 0F0 0F2 0F4 3F1 3I1 3W1 3F3 0F6 3I3 3W3 3F5 0I0 0W0 3I5 3W5 3F7 0I2 0W2 3I7 3W7 0I4 0W4   . 0I6 0W6
        1 |   . 1F0 2F1 1F2 2F3 1F4 2I1 2W1 2F5 1I0 1W0 1F6 2I3 2W3 2F7 1I2 1W2 2I5 2W5 1I4 1W4 2I7 1I6 2W7 1W6
        2 |   . 1F1 2F0 1F3 2F2 1F5 2I0 2W0 2F4 1I1 1W1 1F7 2I2 2W2 2F6 1I3 1W3 2I4 2W4 1I5 1W5 2I6 1I7 2W6 1W7
        3 | 0F1 0F3 0F5 3F0 3I0 3W0 3F2 0F7 3I2 3W2 3F4 0I1 0W1 3I4 3W4 3F6 0I3 0W3 3I6 3W6 0I5 0W5   . 0I7 0W7

    Made for even numbers of micro-batches from 2 p on; what is missing is left out. Every device keeps at most p + 1
    micro-batches, and the weights of two stages.

    Args:
        layout: one stage per device and pipe, in the shape `both_ways`.
        microbatches: number of micro-batches, at least 1.
        options: none are known.

    Raises:
        ConfigError: if an option is unknown, the layout has another shape, or there is no micro-batch.
    """
    read_options(options, schedule="dualpipe", defaults={})
    check_microbatches(microbatches)
    row = row_of(layout, both_ways, schedule="dualpipe", stages_per_device=1)
    p = len(row.devices)
    count = max(p, padded(microbatches, 2) // 2)
    lines = []
    for d in range(p):
        down, up = (d, 0, 2), (p - 1 - d, 1, 2)
        phases = (down, up) if d < p // 2 else (up, down)
        lines.append(_numbered(_actions(min(d, p - 1 - d), places=p // 2, count=count), phases))
    return order_of_devices(without_padding(lines, microbatches), row=row)


def dualpipe_v(layout: Layout, microbatches: int, options: Options = NO_OPTIONS, /) -> Order:
    """Order the computes of a V-shaped pipe as DualPipe, pairs as F, then B.

    Two devices and four micro-batches, one unit for each of F, I and W:

        0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3I1 3W1 3F2 0I0 0W0 3I2 3W2 3F3 0I1 0W1 3I3 3W3 0I2 0W2   . 0I3 0W3
        1 |   . 1F0 2F0 1F1 2F1 1F2 2I0 2W0 2F2 1I0 1W0 1F3 2I1 2W1 2F3 1I1 1W1 2I2 2W2 1I2 1W2 2I3 1I3 2W3 1W3

    Made for 2 p micro-batches or more; what is missing is left out. Every device keeps at most 2 p + 1 micro-batches of
    its two stages, and one copy of the weights.

    Args:
        layout: two stages per device in the shape `zigzag`; devices may be replicas.
        microbatches: number of micro-batches, at least 1.
        options: none are known.

    Raises:
        ConfigError: if an option is unknown, the layout has another shape, or there is no micro-batch.
    """
    read_options(options, schedule="dualpipe_v", defaults={})
    check_microbatches(microbatches)
    row = row_of(layout, zigzag, schedule="dualpipe_v", stages_per_device=2)
    p = len(row.devices)
    count = max(2 * p, microbatches)
    lines = [_numbered(_actions(d, places=p, count=count), phases=((d, 0, 1), (2 * p - 1 - d, 0, 1))) for d in range(p)]
    return order_of_devices(without_padding(lines, microbatches), row=row)


def _actions(place: int, *, places: int, count: int) -> Iterator[Action]:
    """Yield what a device does: the eight steps of the table above."""
    own, inner = place + 1, places - place - 1
    yield from [F0] * (2 * inner)
    yield from [F0, F1] * own
    yield from [I1, W1, F1] * inner
    yield from [F0, B1, F1, B0] * (count - 2 * places + own)
    yield from [B1, F1, B0] * inner
    backwards = [1, 0] * own
    yield from (("B", phase) for phase in backwards[:own])
    yield from (("I", phase) for phase in backwards[own:])
    weights: list[Action] = [("W", phase) for phase in (*backwards[own:], *[0] * inner)]
    for weight in weights[:inner]:
        yield from (weight, I0)
    yield from weights[inner:]


def _numbered(actions: Iterable[Action], phases: tuple[Stream, Stream]) -> Iterator[Compute]:
    """Yield the computes of a device; each kind takes the micro-batches of a stream in turn."""
    done: Counter[Action] = Counter()
    for kind, phase in actions:
        stage, first, step = phases[phase]
        counted = "I" if kind == "B" else kind
        yield Compute(stage, kind, first + step * done[counted, phase])
        done.update([("I", phase), ("W", phase)] if kind == "B" else [(kind, phase)])
