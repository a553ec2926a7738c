"""What does a step leave behind, and does it depend on what earlier steps have left?

While a step is traced all state that it might change is as it was before, and is put back afterwards. What it has
changed is one of

    kept       it gave an attribute a value, or added to a list or dict, without looking at what was there: such values
               are results of the graph, and every rank keeps them after every batch (`record.Kept`)
    state      anything else; the next step depends on it, which a graph cannot repeat: a hazard
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_pipe.capture.hazards import assignment_line, hazard
from lightning_pipe.capture.kept_collections import KeptDict, KeptList, kept_collections
from lightning_pipe.capture.python_reads import Reads, state_slots
from lightning_pipe.capture.python_state import ABSENT, Change, Slot, Snapshot
from lightning_pipe.capture.record import Kept

_MOST_ELEMENTS = 2**18  # of a tensor that every rank keeps after every batch; what is larger stays where it is made


@dataclass
class StepState:
    """State around one run of a step.

    Args:
        module: the user's module.
        reads: what the step reads.

    Attributes:
        kept: what the run has left behind, with the values that the run has left.
        unread: places of lists and dicts whose content the run has not looked at.
    """

    module: pl.LightningModule
    reads: Reads
    kept: list[Kept] = field(default_factory=list)
    unread: list[Slot] = field(default_factory=list)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Run the step inside; everything is put back at the end.

        Raises:
            CaptureError: if the step keeps state that it reads again.
        """
        slots = list(state_slots(self.module))
        snapshot = Snapshot(slots, tree=self.module)
        try:
            with kept_collections(slots) as collections:
                yield
                for slot, collection in collections:
                    self._note_collection(slot, collection)
            for change in _with_new_attributes(snapshot, slots, self.module):
                self._note(change)
        finally:
            restore_state(snapshot, slots, self.module)

    def _note_collection(self, slot: Slot, collection: KeptList | KeptDict) -> None:
        if slot.read() is not collection:
            return
        if collection.is_read:
            if collection.is_changed:
                self._refuse(slot)
            return
        self.unread.append(slot)
        if not collection.is_changed:
            return
        if isinstance(collection, KeptList):
            self._keep(slot, "refill" if collection.is_cleared else "extend", collection.added)
        elif collection.only_grew:
            self._keep(slot, "update", {key: dict.__getitem__(collection, key) for key in collection.written})
        else:
            self._refuse(slot)

    def _note(self, change: Change) -> None:
        if change.now is ABSENT or len(change.slot.path) != 2 or not self.reads.is_fresh(change.slot):
            self._refuse(change.slot)
        self._keep(change.slot, "assign", change.now)

    def _keep(self, slot: Slot, how: Any, value: Any) -> None:
        if not _is_plain(value):
            self._refuse(slot)
        self.kept.append(Kept(slot.path, slot.name, how, value))

    def _refuse(self, slot: Slot) -> None:
        line = assignment_line(self.module, slot.name.removeprefix("self."))
        raise hazard(f"it changes {slot.name} and reads it again in the next call (state)", line)


def _is_plain(value: Any) -> bool:
    """Return whether a value is made of numbers, texts and small tensors, so that every rank can keep it."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, torch.Tensor):
        return math.prod(size if isinstance(size, int) else size.node.hint for size in value.shape) <= _MOST_ELEMENTS
    return isinstance(value, (bool, int, float, str, type(None))) or type(value).__name__ == "TracedNumber"


def _new_attributes(slots: list[Slot], module: pl.LightningModule) -> list[Slot]:
    known = {slot.place for slot in slots}
    return [slot for slot in state_slots(module) if slot.place not in known]


def _with_new_attributes(snapshot: Snapshot, slots: list[Slot], module: pl.LightningModule) -> Iterator[Change]:
    yield from snapshot.changes()
    for slot in _new_attributes(slots, module):
        yield Change(slot, ABSENT, slot.read())


def restore_state(snapshot: Snapshot, slots: list[Slot], module: pl.LightningModule) -> None:
    """Put back what a snapshot of all `state_slots` has, and remove attributes that are new since."""
    for slot in _new_attributes(slots, module):
        slot.write(ABSENT)
    snapshot.restore()


@contextlib.contextmanager
def state_put_back(module: pl.LightningModule) -> Iterator[Snapshot]:
    """Put back what the code inside changes of Python state; the yielded snapshot tells what that is."""
    slots = list(state_slots(module))
    snapshot = Snapshot(slots, tree=module)
    try:
        yield snapshot
    finally:
        restore_state(snapshot, slots, module)
