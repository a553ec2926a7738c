"""Zero bubble H1 and H2: weight gradients wait, and fill the idle time at the end.

Source: Qi, Wan, Huang and Lin, Zero Bubble Pipeline Parallelism (2023), section 2. I needs the I of the next stage, W
only its own I. So W runs some computes after I. It catches up at the end, when a device would wait for the next stage.
On device d, with one stage on each:

                      H1                                    H2
    forwards first    p - 1 - d                             2 (p - 1 - d)
    W behind I by     d                                     2 d
    kept until I      p - d                                 2 (p - d) - 1
    kept until W      p                                     2 p - 1
    idle with flush   (p-1) max(tF, tI, tF + tI - tW)       (p-1) max(tF, tI - tF, tF + tI - 2 tW)

H2 has no idle time within the span of a device where F, I and W take equally long. With the flush at the end of the
step it then takes as long as H1: its gain needs optimizer steps that do not wait for other devices.

Legend: p devices, d device, v chunks (stages per device), tF, tI, tW seconds.
"""

from __future__ import annotations

from lightning_pipe.core.program import Compute, ComputeKind, Layout, Options, Order
from lightning_pipe.schedule.construct.device_orders import order_of_devices, padded, without_padding
from lightning_pipe.schedule.construct.layout_shapes import looping, row_of
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS
from lightning_pipe.schedule.orders.interleaved import checked, in_groups, read_group

KINDS: tuple[ComputeKind, ...] = ("F", "I", "W")


def zb_h1(layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Order forwards and input gradients as 1F1B, and weight gradients d computes behind on device d.

    Four devices and six micro-batches, one unit for each of F, I and W:

        0 | F0 F1 F2 F3  .  .  . I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        1 |  . F0 F1 F2  .  . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        2 |  .  . F0 F1  . I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        3 |  .  .  . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5

    Keeps what 1F1B keeps on its first device. With several chunks forwards and backwards run in groups as in
    `interleaved`, with (v - 1) g more forwards first: the order of torch's `ScheduleInterleavedZeroBubble`.

    Args:
        layout: ranks of each stage, going round the devices.
        microbatches: number of micro-batches, at least 1.
        options: `group`: micro-batches per group, by default as in `interleaved`; with one chunk it does not matter,
            with several and fewer than (p - 1) / 2 the order may deadlock.

    Raises:
        ConfigError: if the layout does not go round its devices, an option is unknown or unreadable, groups are so
            small that the order deadlocks, or there is no micro-batch.
    """
    return _delayed(layout, microbatches, options, hops=1, schedule="zb_h1")


def zb_h2(layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Order forwards and input gradients as 1F1B with warm-up "pb", and weight gradients 2 d computes behind.

    Three devices and six micro-batches, one unit for each of F, I and W:

        0 | F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5
        1 |  . F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5
        2 |  .  . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5

    Keeps twice as many micro-batches as `zb_h1`, and needs 2 p - 1 of them for its formulas. Several chunks run in
    groups as in `zb_h1` (the paper has one).

    Args:
        layout: ranks of each stage, going round the devices.
        microbatches: number of micro-batches, at least 1.
        options: `group`: as in `interleaved`.

    Raises:
        ConfigError: as `zb_h1`.
    """
    return _delayed(layout, microbatches, options, hops=2, schedule="zb_h2")


def _delayed(layout: Layout, microbatches: int, options: Options, *, hops: int, schedule: str) -> Order:
    """Return the order with `hops` more forwards first per device behind, and W `hops` later per device before."""
    row = row_of(layout, looping, schedule=schedule)
    group = read_group(options, row=row, microbatches=microbatches, schedule=schedule)
    count = padded(microbatches, group)
    lines = []
    for d in range(len(row.devices)):
        forwards, inputs, weights = (in_groups(kind, d, row=row, group=group, microbatches=count) for kind in KINDS)
        depth = hops * (len(row.devices) - 1 - d) + (row.stages_per_device - 1) * group
        lines.append(_line(forwards, inputs, weights, depth=depth, lag=hops * d))
    order = order_of_devices(without_padding(lines, microbatches), row=row)
    return checked(order, layout, group=group, schedule=schedule)


def _line(
    forwards: list[Compute], inputs: list[Compute], weights: list[Compute], *, depth: int, lag: int
) -> list[Compute]:
    line = forwards[:depth]
    for k, compute in enumerate(inputs):
        line += [*forwards[depth + k : depth + k + 1], compute, *(weights[k - lag : k - lag + 1] if k >= lag else [])]
    return [*line, *weights[max(0, len(weights) - lag) :]]
