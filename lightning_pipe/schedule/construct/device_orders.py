"""Device orders joined into the order of all ranks: every replica runs its device's line, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_pipe.core.program import Compute, Order
from lightning_pipe.schedule.construct.layout_shapes import RowShape


def order_of_devices(lines: Sequence[Sequence[Compute]], *, row: RowShape) -> Order:
    """Return the order in which every rank runs the line of its device; ranks of no device run nothing."""
    by_rank = {rank: tuple(line) for line, device in zip(lines, row.devices, strict=True) for rank in device}
    return tuple(by_rank.get(rank, ()) for rank in range(1 + max(by_rank)))


def without_padding(lines: Iterable[Iterable[Compute]], microbatches: int) -> tuple[tuple[Compute, ...], ...]:
    """Return lines without the computes of micro-batches that do not exist.

    Computes of different micro-batches do not need each other, so what is left can run in the same order. A schedule
    that is stated for multiples of a number is asked for the next multiple, and what is too much is left out.
    """
    return tuple(tuple(compute for compute in line if compute.microbatch < microbatches) for line in lines)


def padded(microbatches: int, multiple: int) -> int:
    """Return the next multiple of a number from a number of micro-batches on."""
    return -(-microbatches // multiple) * multiple
