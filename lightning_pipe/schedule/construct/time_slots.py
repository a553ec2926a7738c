"""Time slots: the order of a device's computes from their slots in a grid of equal times.

After Li and Hoefler (Chimera, SC'21, section 3.1): a micro-batch enters a chain of S stages every second slot, moves
one stage per slot, turns round at the last stage and comes back. Micro-batch j, counted from 0, of a unit that begins
at slot 0:

    F of stage s    slot 2 j + s
    B of stage s    slot 2 j + 2 S - 1 - s

A schedule that is built so takes no two computes of a device in one slot (forwards that go in pairs share theirs), so
slots order them, whatever they take.

Legend: s stage, S stages of the chain, j micro-batch of a unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from lightning_pipe.core.program import Compute

Slotted: TypeAlias = tuple[int, Compute]


def forward_slot(stage: int, entry: int) -> int:
    """Return the slot of F on a stage, given the one of the micro-batch's F on the first stage."""
    return entry + stage


def backward_slot(stage: int, entry: int, stages: int) -> int:
    """Return the slot of B on a stage; a micro-batch that goes forward alone has the same entry as its F."""
    return entry + 2 * stages - 1 - stage


def in_slots(slotted: Iterable[Slotted]) -> list[Compute]:
    """Return computes in the order of their slots; forwards that share one in the order of their micro-batches."""
    return [compute for _, compute in sorted(slotted)]
