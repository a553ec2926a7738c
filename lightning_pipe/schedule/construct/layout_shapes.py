"""Layout shapes of schedules (which ranks run which stage), constructed and recognized.

Devices stand in a row. A device is one rank, or several that are replicas of each other. With v stages on each of p
devices a layout has p v stages:

    looping      stage s on device s mod p; linear if v = 1       v = 2:  0 1 2 3  0 1 2 3
    zigzag       forth and back; called V if v = 2                v = 2:  0 1 2 3  3 2 1 0
    both ways    zigzag (linear if v = 1), and the same mirrored: every stage has two replicas, which take whole
                 micro-batches in turn. Even micro-batches travel from the first device on, odd ones from the last:
                 two pipes with the same weights (after Li and Hoefler, Chimera, SC'21, section 3)

Legend: s stage, p devices, v stages per device (in each of its pipes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_pipe.core.program import Layout
from lightning_pipe.errors import ConfigError

Device: TypeAlias = tuple[int, ...]  # ranks that are replicas of each other
Shape: TypeAlias = Callable[[Sequence[Device], int], Layout]


@dataclass(frozen=True)
class RowShape:
    """The devices of a layout in a row, and the number of stages on each (in each of its pipes)."""

    devices: tuple[Device, ...]
    stages_per_device: int


def looping(devices: Sequence[Device], v: int) -> Layout:
    """Return the layout whose stages go round the devices."""
    return Layout(tuple(devices[s % len(devices)] for s in range(len(devices) * v)))


def zigzag(devices: Sequence[Device], v: int) -> Layout:
    """Return the layout whose stages go along the devices forth and back."""
    row = tuple(devices)
    return Layout(tuple(device for turn in range(v) for device in (row[::-1] if turn % 2 else row)))


def both_ways(devices: Sequence[Device], v: int) -> Layout:
    """Return the layout of two pipes that enter the row at its two ends.

    Raises:
        ConfigError: if a device is not one rank, or their number is odd.
    """
    if len(devices) % 2 or any(len(device) != 1 for device in devices):
        raise ConfigError(
            f"found the devices {list(devices)}; two pipes in opposite directions need an even number of devices of "
            "one rank each"
        )
    down, up = zigzag(devices, v).stages, zigzag(devices[::-1], v).stages
    stages = tuple((*ours, *theirs) for ours, theirs in zip(down, up, strict=True))
    return Layout(stages, frozenset(range(len(stages))))


SHAPES: dict[str, Shape] = {"looping": looping, "zigzag": zigzag, "both ways": both_ways}
_WORDS: dict[Shape, str] = {
    looping: "stages that go round the devices (stage s on the ranks of stage s mod p)",
    zigzag: "stages that go along the devices forth and back (0 1 2 2 1 0)",
    both_ways: "stages with two replicas that take whole micro-batches in turn, one on either end of the row",
}


def row_of(layout: Layout, shape: Shape, *, schedule: str, stages_per_device: int | None = None) -> RowShape:
    """Return the row of devices from which a shape makes a layout.

    Args:
        layout: ranks of each stage; weights of replicas do not matter.
        shape: `looping`, `zigzag` or `both_ways`.
        schedule: who asks, for the error.
        stages_per_device: number of stages per device (in each of its pipes) that it needs, if it needs one.

    Raises:
        ConfigError: if the shape makes no such layout.
    """
    row = _devices(layout, shape)
    found, rest = divmod(len(layout.stages), len(row))
    if not rest and stages_per_device in (None, found) and _can_be(row, shape):
        made = shape(row, found)
        if made.stages == layout.stages and made.whole == (layout.whole if shape is both_ways else frozenset()):
            return RowShape(row, found)
    in_each = " on each device" + (" in each pipe" if shape is both_ways else "")
    number = "" if stages_per_device is None else f", {stages_per_device}{in_each}"
    raise ConfigError(
        f"schedule {schedule!r} needs {_WORDS[shape]}{number}; found the ranks {' '.join(map(str, layout.stages))}"
        + (f", of which stages {sorted(layout.whole)} share by whole micro-batches" if layout.whole else "")
        + ". Change the layout, or choose another schedule."
    )


def _devices(layout: Layout, shape: Shape) -> tuple[Device, ...]:
    """Return the devices that the first stages name until one comes again."""
    stages = [ranks[:1] for ranks in layout.stages] if shape is both_ways else layout.stages
    seen: dict[Device, None] = {}
    for device in stages:
        if device in seen:
            break
        seen[device] = None
    return tuple(seen)


def _can_be(row: Sequence[Device], shape: Shape) -> bool:
    """Return whether no rank is in two devices, and a shape can be made of them."""
    ranks = [rank for device in row for rank in device]
    return len(set(ranks)) == len(ranks) and (shape is not both_ways or len(row) % 2 == 0)
