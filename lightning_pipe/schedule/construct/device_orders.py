"""Device orders joined into the order of all ranks: every replica runs its device's line, without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from lightning_pipe.core.program import Compute, CopyingOrder, HostCopy, Order
from lightning_pipe.schedule.construct.layout_shapes import RowShape

OrderedT = TypeVar("OrderedT", Compute, Compute | HostCopy)


def order_of_devices(lines: Sequence[Sequence[Compute]], *, row: RowShape) -> Order:
    """Return the order in which every rank runs the line of its device; ranks of no device run nothing."""
    by_rank = {rank: tuple(line) for line, device in zip(lines, row.devices, strict=True) for rank in device}
    return tuple(by_rank.get(rank, ()) for rank in range(1 + max(by_rank)))


def computes_only(order: CopyingOrder) -> Order:
    """Return an order without the places of copies."""
    return tuple(tuple(one for one in line if isinstance(one, Compute)) for line in order)


def without_padding(lines: Iterable[Iterable[OrderedT]], microbatches: int) -> tuple[tuple[OrderedT, ...], ...]:
    """Return lines without the computes, and the copies, of micro-batches that do not exist.

    Computes of different micro-batches do not need each other, so what is left can run in the same order. A schedule
    that is stated for multiples of a number is asked for the next multiple, and what is too much is left out.
    """
    return tuple(tuple(one for one in line if one.microbatch < microbatches) for line in lines)


def padded(microbatches: int, multiple: int) -> int:
    """Return the next multiple of a number from a number of micro-batches on."""
    return -(-microbatches // multiple) * multiple
