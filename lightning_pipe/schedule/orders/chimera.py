"""Chimera: two 1F1B pipes in opposite directions fill each other's gaps (after Li and Hoefler, SC'21, section 3).

Every stage stands on two devices, d and p-1-d, with the same weights: memory for two stages' weights per device, and
one all-reduce of gradients per step for each. In return the bubble of a unit of p micro-batches is p-2 computes of
equal length, not 2 (p-1), and devices keep p/2 + 1 to p micro-batches.

More micro-batches than a unit (names of the paper, rules as in the code of its authors, github.com/Shigangli/Chimera):

    direct      units follow each other. Where backwards take longer than forwards each adds a gap of p-2, unless input
                gradients leave before W (`main_with_runtime_direct.py`)
    doubling    2 p micro-batches make a unit. They go forward in pairs and backward one by one, so that a slot of
                forwards takes as long as one of backwards: no gaps between units, but up to twice the activations
                (`main_with_runtime_forward_doubling.py`; its forwards of a pair are two computes, as they are here)

Legend: d device, p devices, s stage, u unit, j micro-batch of one pipe in a unit, h = p/2 of each pipe per direct unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from lightning_pipe.core.program import Compute, Layout, Options, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.construct.device_orders import order_of_devices, without_padding
from lightning_pipe.schedule.construct.layout_shapes import both_ways, row_of
from lightning_pipe.schedule.construct.options import check_microbatches, read_options
from lightning_pipe.schedule.construct.time_slots import Slotted, backward_slot, forward_slot, in_slots
from lightning_pipe.schedule.orders.gpipe import NO_OPTIONS

CONCATENATIONS = ("direct", "doubling")


def chimera(layout: Layout, microbatches: int, options: Options = NO_OPTIONS, /) -> Order:
    """Order the computes of two opposite pipes by their slots.

    Four devices and four micro-batches, one unit for each of F, I and W; even micro-batches go down, odd ones up:

        0 | 0F0 0F2   . 3F1 3I1 3W1 3F3 3I3 3W3 0I0 0W0   . 0I2 0W2
        1 |   . 1F0 2F1 1F2 2F3 2I1 2W1 1I0 1W0 2I3 2W3 1I2 1W2
        2 |   . 1F1 2F0 1F3 2F2 2I0 2W0 1I1 1W1 2I2 2W2 1I3 1W3
        3 | 0F1 0F3   . 3F0 3I0 3W0 3F2 3I2 3W2 0I1 0W1   . 0I3 0W3

    Made for multiples of p micro-batches; for other numbers the last unit lacks some. Doubling makes units of 2 p as
    long as more than p are left, and of the rest a direct one.

    Args:
        layout: one stage per device and pipe, in the shape `both_ways`.
        microbatches: number of micro-batches, at least 1.
        options: `concatenation`: "direct" (default) or "doubling".

    Raises:
        ConfigError: if an option is unknown, the layout has another shape, or there is no micro-batch.
    """
    read = read_options(options, schedule="chimera", defaults={"concatenation": CONCATENATIONS[0]})
    if read["concatenation"] not in CONCATENATIONS:
        raise ConfigError(
            f"schedule 'chimera': found concatenation {read['concatenation']!r}; expected one of "
            + ", ".join(map(repr, CONCATENATIONS))
        )
    check_microbatches(microbatches)
    row = row_of(layout, both_ways, schedule="chimera", stages_per_device=1)
    p = len(row.devices)
    units = _units(p, microbatches, doubling=read["concatenation"] == "doubling")
    lines = (in_slots(_computes(units, p, d)) for d in range(p))
    return order_of_devices(without_padding(lines, microbatches), row=row)


@dataclass(frozen=True)
class _Unit:
    """Micro-batches that enter together: h of each pipe, or p that go forward in pairs.

    Attributes:
        first_slot: when it begins.
        first: number of its first micro-batch in each pipe.
        count: how many there are of each pipe.
        abreast: how many go forward in one slot.
    """

    first_slot: int
    first: int
    count: int
    abreast: int


def _units(p: int, microbatches: int, *, doubling: bool) -> list[_Unit]:
    """Return the units; one takes p slots of forwards and as many of backwards as it has micro-batches."""
    doubles = (microbatches + p - 1) // (2 * p) if doubling else 0
    singles = -(-max(0, microbatches - 2 * p * doubles) // p)
    abreast = [2] * doubles + [1] * singles
    counts = [k * p // 2 for k in abreast]
    firsts = accumulate(counts, initial=0)
    slots = accumulate((p + 2 * count for count in counts), initial=0)
    return [_Unit(*unit) for unit in zip(slots, firsts, counts, abreast, strict=False)]


def _computes(units: list[_Unit], p: int, d: int) -> Iterator[Slotted]:
    """Yield the computes of a device with their slots; the j-th micro-batch of pipe 0 is 2 j, of pipe 1 2 j + 1."""
    for unit in units:
        for pipe, stage in ((0, d), (1, p - 1 - d)):
            for j in range(unit.count):
                microbatch = 2 * (unit.first + j) + pipe
                forward = unit.first_slot + 2 * (j // unit.abreast)
                yield forward_slot(stage, forward), Compute(stage, "F", microbatch)
                yield backward_slot(stage, unit.first_slot + 2 * j, p), Compute(stage, "B", microbatch)
