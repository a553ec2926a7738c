"""Devices of a layout, whatever its shape: the stages that each holds, and the bytes an order keeps there.

For schedules that look at times. A device is a rank, or several that are replicas of each other and run one line. What
a rank keeps is counted between its computes: F leaves `saved_bytes`, I takes these and leaves `kept_bytes`, W takes
those. Of what F leaves, `copied_bytes` are on the host from `VACATE` to `FETCH`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from lightning_pipe.core.program import Compute, CopyingOrder, HostCopy, Layout
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.construct.device_orders import OrderedT
from lightning_pipe.schedule.construct.layout_shapes import Device
from lightning_pipe.schedule.construct.stage_times import ChainTimes
from lightning_pipe.schedule.rules import halves

ROUNDING = 1e-9  # what fills the room exactly must fit, whatever the order of its sum


def stages_by_device(layout: Layout, *, schedule: str) -> dict[Device, tuple[int, ...]]:
    """Return the stages of every device, devices in the order of their first stages.

    Args:
        layout: ranks of each stage.
        schedule: who asks, for the error.

    Raises:
        ConfigError: if two devices share a rank, or replicas take whole micro-batches in turn.
    """
    found: dict[Device, list[int]] = {}
    for stage, ranks in enumerate(layout.stages):
        found.setdefault(ranks, []).append(stage)
    named = list(itertools.chain.from_iterable(found))
    if len(set(named)) < len(named) or layout.whole:
        raise ConfigError(
            f"schedule {schedule!r} needs stages whose ranks are the same or have none in common, and replicas that "
            f"share every micro-batch; found the ranks {' '.join(map(str, layout.stages))}"
            + (f", of which stages {sorted(layout.whole)} share by whole micro-batches" if layout.whole else "")
            + ". Change the layout, or choose another schedule."
        )
    return {device: tuple(stages) for device, stages in found.items()}


def order_of_lines(lines: Mapping[Device, Sequence[OrderedT]]) -> tuple[tuple[OrderedT, ...], ...]:
    """Return the order in which every rank runs the line of its device."""
    by_rank = {rank: tuple(line) for device, line in lines.items() for rank in device}
    return tuple(by_rank.get(rank, ()) for rank in range(1 + max(by_rank)))


def room_of(device: Device, times: ChainTimes) -> float:
    """Return the bytes that every rank of a device has."""
    return min(times.room_bytes[rank] for rank in device)


def bytes_of(compute: Compute | HostCopy, times: ChainTimes) -> float:
    """Return the bytes by which a compute, or a copy to the host, changes what its rank keeps."""
    if isinstance(compute, HostCopy):
        return compute.effects.bytes * times.copied_bytes[compute.stage]
    saved, kept = times.saved_bytes[compute.stage], times.kept_bytes[compute.stage]
    return {"F": saved, "I": kept - saved, "W": -kept, "B": -saved}[compute.kind]


def peak_bytes(line: Iterable[Compute | HostCopy], times: ChainTimes) -> float:
    """Return the most bytes that a rank keeps while it runs a line."""
    changes = (bytes_of(part, times) for one in line for part in _parts(one))
    return max(itertools.accumulate(changes), default=0.0)


def _parts(one: Compute | HostCopy) -> Iterable[Compute | HostCopy]:
    return halves(one) if isinstance(one, Compute) else (one,)


def fits(order: CopyingOrder, times: ChainTimes) -> bool:
    """Return whether no rank keeps more than it has room for."""
    peaks = (peak_bytes(line, times) for line in order)
    return all(peak <= room * (1 + ROUNDING) for peak, room in zip(peaks, times.room_bytes, strict=True))
