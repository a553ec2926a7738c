"""ZB-V: no device waits between its first and its last compute, with the memory of 1F1B.

Source: Qi, Wan, Huang and Lin, Zero Bubble Pipeline Parallelism (2023), section 6; the order is that of
`ScheduleZBVZeroBubble` of torch.distributed.pipelining. The stages go along the devices and back, so that the loss is
on the device that holds the input, and its backward can begin right there. The backward is split, and W fills the
idle time.

That holds where F, I and W take equally long; "zb_v_greedy" is for other times.

Legend: p devices, d device, m micro-batches; `down` is the stage of a device on the way forth, `up` on the way back.
"""

from __future__ import annotations

from collections import Counter

from lightning_pipe.core.program import Compute, ComputeKind, Layout, Options, Order
from lightning_pipe.schedule.construct.device_orders import order_of_devices, without_padding
from lightning_pipe.schedule.construct.layout_shapes import row_of, zigzag
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS


def zb_v(layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Order two stages per device such that W fills what would be idle.

    Made for 2p - 1 micro-batches or more: then, if F, I and W of a stage take one unit, every device works 6m units
    without a pause, and all is done after 6m + p - 1. For fewer it is the order for 2p - 1 without those that do not
    exist, and takes 4m + 4p - 2. Device d keeps min(2p, 2m, m + 1 + d) micro-batches of its stages: at most the memory
    of 1F1B, whose stages are twice as large. Two devices, four micro-batches:

        0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
        1 |   . 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    Args:
        layout: ranks of each stage, along the devices and back; two stages per device.
        microbatches: number of micro-batches, at least 1.
        options: none are known.

    Raises:
        ConfigError: if an option is unknown, there is no micro-batch, or the layout has another shape.
    """
    read_options(options, schedule="zb_v", defaults={})
    check_microbatches(microbatches)
    row = row_of(layout, zigzag, schedule="zb_v", stages_per_device=2)
    p, count = len(row.devices), max(2 * len(row.devices) - 1, microbatches)
    lines = [_device_line(d, p, count) for d in range(p)]
    return order_of_devices(without_padding(lines, microbatches), row=row)


def _device_line(d: int, p: int, microbatches: int) -> list[Compute]:
    """Return the line of a device for at least 2p - 1 micro-batches."""
    down, up = d, 2 * p - 1 - d
    line, done = list[Compute](), Counter[tuple[int, ComputeKind]]()

    def run(stage: int, *kinds: ComputeKind) -> None:
        for kind in kinds:
            line.append(Compute(stage, kind, done[stage, kind]))
            done[stage, kind] += 1

    for _ in range(2 * (p - d) - 1):
        run(down, "F")
    for _ in range(d):
        run(up, "F")
        run(down, "F")
    for _ in range(p - d):
        run(up, "F", "I", "W")
    while done[up, "F"] < microbatches:
        if done[down, "F"] < microbatches:
            run(down, "F")
        run(down, "I", "W")
        run(up, "F", "I", "W")
    for _ in range(d):
        run(down, "I")
        run(up, "I")
    for _ in range(p - d):
        run(down, "I", "W")
    for stage in (up, down):
        for _ in range(done[stage, "W"], microbatches):
            run(stage, "W")
    return line
