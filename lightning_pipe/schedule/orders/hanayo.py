"""Hanayo: waves run forth and back over the devices (after Liu, Cheng, Zhou and You, SC'23).

Stages go along the devices in a zigzag; one wave is once forth and back, 2 stages per device, and W waves are 2 W.
Folding Chimera's two pipes onto each other gives a wave, with one copy of the weights; at its turning points values
stay on their device. The order is derived in this way, by the slots of `time_slots`. It agrees with the paper's
description of waves, but there is no public code to compare with. More waves shorten the bubble and send more messages.
Every device keeps the activations of at most p micro-batches.

Legend: d device, p devices, S = 2 W p stages, u unit of p micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_pipe.core.program import Compute, Layout, Options, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.construct.device_orders import order_of_devices, padded, without_padding
from lightning_pipe.schedule.construct.layout_shapes import row_of, zigzag
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.construct.time_slots import Slotted, backward_slot, forward_slot, in_slots
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS


def hanayo(layout: Layout, microbatches: int, options: Options = NO_OPTIONS, /) -> Order:
    """Order the computes of a zigzag by their slots, in units of p micro-batches.

    Three devices, one wave and three micro-batches, one unit for each of F, I and W:

        0 | 0F0 0F1 0F2   .   . 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 0I0 0W0   . 0I1 0W1   . 0I2 0W2
        1 |   . 1F0 1F1   . 4F0 1F2 4F1 4I0 4W0 4F2 4I1 4W1 1I0 1W0 4I2 4W2 1I1 1W1   . 1I2 1W2
        2 |   .   . 2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2I0 2W0 3I1 3W1 2I1 2W1 3I2 3W2 2I2 2W2

    Made for multiples of p micro-batches; for other numbers the last unit lacks some.

    Args:
        layout: an even number of stages per device, in the shape `zigzag`; devices may be replicas.
        microbatches: number of micro-batches, at least 1.
        options: none are known; the number of waves is that of the layout.

    Raises:
        ConfigError: if an option is unknown, the layout has another shape, or there is no micro-batch.
    """
    read_options(options, schedule="hanayo", defaults={})
    check_microbatches(microbatches)
    row = row_of(layout, zigzag, schedule="hanayo")
    if row.stages_per_device % 2:
        raise ConfigError(
            f"schedule 'hanayo': found {row.stages_per_device} stages per device; a wave runs forth and back and needs "
            "two of them, so choose an even number"
        )
    p = len(row.devices)
    lines = (in_slots(_computes(p, row.stages_per_device, d, padded(microbatches, p))) for d in range(p))
    return order_of_devices(without_padding(lines, microbatches), row=row)


def _computes(p: int, chunks: int, d: int, microbatches: int) -> Iterator[Slotted]:
    """Yield the computes of a device with their slots."""
    stages = chunks * p
    held = [chunk * p + (p - 1 - d if chunk % 2 else d) for chunk in range(chunks)]
    for microbatch in range(microbatches):
        entry = 2 * stages * (microbatch // p) + 2 * (microbatch % p)
        for stage in held:
            yield forward_slot(stage, entry), Compute(stage, "F", microbatch)
            yield backward_slot(stage, entry, stages), Compute(stage, "B", microbatch)
