"""Breadth-first: all micro-batches go through one round of stages before any goes through the next.

Source: Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism", section 4. It has the bubble and messages of
interleaved 1F1B if there are at least as many micro-batches as devices, but keeps every micro-batch of every stage. In
return, each device works on a stage in two blocks, one of forwards and one of backwards. Sharded parameters are then
gathered once per block and gradients reduced once per step, overlapping the computes of the next block.
"""

from __future__ import annotations

from lightning_pipe.core.program import Compute, Layout, Options, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.construct.device_orders import order_of_devices
from lightning_pipe.schedule.construct.layout_shapes import looping, row_of
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS

STEPS = {"ascending": 1, "descending": -1}  # of the micro-batches of a block of backwards


def breadth_first(layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Order all forwards stage by stage, then all backwards from the device's last stage to its first.

    Two devices of two stages each and four micro-batches, one unit for each of F, I and W (stage before kind):

        0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3   .   . 2I0 2W0 2I1 2W1 2I2 2W2 2I3 2W3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
        1 |   . 1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3I0 3W0 3I1 3W1 3I2 3W2 3I3 3W3 1I0 1W0 1I1 1W1 1I2 1W2 1I3 1W3

    With one stage per device it is GPipe.

    Args:
        layout: ranks of each stage, going round the devices.
        microbatches: number of micro-batches, at least 1.
        options: `backward`: "ascending" (default) runs the backwards of a stage in the order of the micro-batches, as
            the paper's code does; "descending" from the last to the first, as torch's `ScheduleLoopedBFS`.

    Raises:
        ConfigError: if the layout does not go round its devices, an option is unknown or unreadable, or there is no
            micro-batch.
    """
    row = row_of(layout, looping, schedule="breadth_first")
    backward = read_options(options, schedule="breadth_first", defaults={"backward": "ascending"})["backward"]
    check_microbatches(microbatches)
    if backward not in STEPS:
        expected = " or ".join(f'"{name}"' for name in STEPS)
        raise ConfigError(f"schedule 'breadth_first': found backward {backward!r}; expected {expected}")
    devices, rounds, all_of_them = len(row.devices), range(row.stages_per_device), range(microbatches)
    lines = [
        [
            *(Compute(c * devices + d, "F", m) for c in rounds for m in all_of_them),
            *(Compute(c * devices + d, "B", m) for c in rounds[::-1] for m in all_of_them[:: STEPS[str(backward)]]),
        ]
        for d in range(devices)
    ]
    return order_of_devices(lines, row=row)
