"""Interleaved 1F1B: every device holds several stages, and takes the micro-batches through them in groups.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
section 2.2; the order is that of Megatron's `schedules.py` and of torch's `ScheduleInterleaved1F1B`.

With v chunks the pipeline fills in steps of one chunk, so the bubble is 1F1B's divided by v, for v times as many
messages. Device d keeps up to 2 (p - 1 - d) + (v - 1) g + 1 micro-batches of one chunk, a v-th of a stage each.

Legend: p devices, d device, v chunks (stages per device), m micro-batches, g micro-batches per group.
"""

from __future__ import annotations

from lightning_pipe.core.program import Compute, ComputeKind, Layout, Options, Order
from lightning_pipe.errors import ConfigError, ProgramError
from lightning_pipe.schedule.construct.chain_run import chain_makespan
from lightning_pipe.schedule.construct.device_orders import order_of_devices, padded, without_padding
from lightning_pipe.schedule.construct.layout_shapes import RowShape, looping, row_of
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.construct.stage_times import unit_times
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS


def interleaved(layout: Layout, microbatches: int, options: Options = NO_OPTIONS) -> Order:
    """Order forwards and backwards in turn, by groups of micro-batches, and within a group stage by stage.

    Two devices of two stages each and four micro-batches, one unit for each of F, I and W (stage before kind):

        0 | 0F0 0F1 2F0 2F1 0F2 2I0 2W0 0F3 2I1 2W1 2F2 0I0 0W0 2F3 0I1 0W1   . 2I2 2W2   . 2I3 2W3 0I2 0W2 0I3 0W3
        1 |   . 1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1F2 1I0 1W0 1F3 1I1 1W1 3F2 3I2 3W2 3F3 3I3 3W3 1I2 1W2 1I3 1W3

    Forwards take a group through the first chunk, then through the second, and so on; backwards from the last chunk to
    the first. Device d runs 2 (p - 1 - d) + (v - 1) g forwards first, then a forward and a backward in turn. With one
    chunk that is 1F1B with warm-up "pb". A last group that is not full runs as if it were.

    Args:
        layout: ranks of each stage, going round the devices.
        microbatches: number of micro-batches, at least 1.
        options: `group`: micro-batches per group, at least 1; by default p, or where p does not divide their number
            the least that makes m // p groups (torch's choice). More keep more and give messages more time; with
            fewer than p - 1 and several groups the order may deadlock.

    Raises:
        ConfigError: if the layout does not go round its devices, an option is unknown or unreadable, groups are so
            small that the order deadlocks, or there is no micro-batch.
    """
    row = row_of(layout, looping, schedule="interleaved")
    group = read_group(options, row=row, microbatches=microbatches, schedule="interleaved")
    lines = [_line(device, row, group, padded(microbatches, group)) for device in range(len(row.devices))]
    order = order_of_devices(without_padding(lines, microbatches), row=row)
    return checked(order, layout, group=group, schedule="interleaved")


def read_group(options: Options, *, row: RowShape, microbatches: int, schedule: str) -> int:
    """Return the micro-batches per group of a schedule that has this one option.

    Raises:
        ConfigError: if there is another option, the group is no number from 1 on, or there is no micro-batch.
    """
    check_microbatches(microbatches)
    groups = max(1, microbatches // len(row.devices))
    group = read_options(options, schedule=schedule, defaults={"group": -(-microbatches // groups)})["group"]
    if not isinstance(group, int) or group < 1:
        raise ConfigError(f"schedule {schedule!r}: found group {group!r}; expected a number of micro-batches from 1 on")
    return group


def _line(device: int, row: RowShape, group: int, microbatches: int) -> list[Compute]:
    forwards = in_groups("F", device, row=row, group=group, microbatches=microbatches)
    backwards = in_groups("B", device, row=row, group=group, microbatches=microbatches)
    depth = min(2 * (len(row.devices) - 1 - device) + (row.stages_per_device - 1) * group, len(forwards))
    pairs = zip(forwards[depth:], backwards, strict=False)
    return [*forwards[:depth], *(compute for pair in pairs for compute in pair), *backwards[len(forwards) - depth :]]


def in_groups(kind: ComputeKind, device: int, *, row: RowShape, group: int, microbatches: int) -> list[Compute]:
    """Return the computes of one kind of a device: group by group, chunk by chunk; backwards from the last chunk on.

    Args:
        kind: F, or a kind of backward.
        device: index in the row.
        row: devices in a looping layout.
        group: micro-batches per group.
        microbatches: their number, a multiple of `group`.
    """
    chunks = range(row.stages_per_device) if kind == "F" else range(row.stages_per_device)[::-1]
    return [
        Compute(chunk * len(row.devices) + device, kind, m)
        for first in range(0, microbatches, group)
        for chunk in chunks
        for m in range(first, first + group)
    ]


def checked(order: Order, layout: Layout, *, group: int, schedule: str) -> Order:
    """Return an order if it can be run to its end.

    Let device d run w_d forwards first, and count the forwards and backwards of every device. Backward j of the last
    device waits for j - g of the first (chunks behind come earlier), that for forward j - g + w_0 of the first, that
    for forward j - 2 g + w_0 of the last (chunks before), and that for backward j - 2 g + w_0 - w_{p-1} - 1 of the
    last, which must be earlier than j. Since w_0 - w_{p-1} is at most 2 (p - 1), it is with groups of p - 1 or more.
    With smaller ones it depends on where chunks and groups end, so their orders are run to find out.

    Raises:
        ConfigError: if ranks wait for each other for ever.
    """
    devices = len(set(layout.stages))
    if group >= devices - 1:
        return order
    try:
        chain_makespan(order, layout, unit_times(layout))
    except ProgramError as error:
        raise ConfigError(
            f"schedule {schedule!r}: found groups of {group} micro-batches on {devices} devices, with which {error}; "
            f"expected groups of {devices - 1} or more"
        ) from None
    return order
