"""Guards that tell, before every batch, whether a graph still holds for the Python it was traced from.

Guards hold what the step read while it was traced: places and what is behind them (`snapshots`), values of
expressions over tracked numbers (`tracked_number`), the versions of tensors from outside of the step, and settings of
torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture.python.places import Place
from lightning_pipe.capture.python.snapshots import Snapshot
from lightning_pipe.capture.torch_private import version_of
from lightning_pipe.capture.tracked.number_expressions import NumberGuards, Situation


@dataclass(frozen=True)
class PythonGuards:
    """What must not have changed.

    Attributes:
        numbers: expressions over tracked numbers.
        read: what the step read, as it was.
        constants: tensors from outside of the step, with version and the user's line.
        settings: of torch, by name.
        filled: places of dicts, with the keys that the step sets before it looks at all of them.
    """

    numbers: NumberGuards
    read: Snapshot
    constants: tuple[tuple[torch.Tensor, int, str], ...]
    settings: dict[str, Any]
    filled: tuple[tuple[Place, frozenset[Any]], ...] = ()

    def broken(self, situation: Situation) -> str:
        """Return what has changed, "" if nothing has."""
        if change := self.read.first_change():
            return str(change)
        for tensor, version, line in self.constants:
            if version_of(tensor) != version:
                return f"a tensor that is no parameter and no buffer, read at {line}, was written to"
        for name, now in settings().items():
            if now != self.settings[name]:
                return f"torch's {name} was {self.settings[name]} and is {now} now"
        for slot, keys in self.filled:
            found = slot.read()
            if not (isinstance(found, dict) and found.keys() <= keys):
                return f"{slot.name} has entries that the step reads and does not set"
        return self.numbers.broken(situation)

    def varying(self) -> tuple[Place, ...]:
        """List the places of numbers that have become other numbers."""
        changes = (change for change in self.read.changes() if change.slot.is_writable and not change.is_content)
        return tuple(c.slot for c in changes if {type(c.before), type(c.now)} <= {int, float})


def guards_of(
    module: nn.Module,
    *,
    numbers: NumberGuards,
    slots: Iterable[Place],
    varying: Iterable[Place],
    unread: Iterable[Place],
    constants: Iterable[tuple[torch.Tensor, str]],
    filled: Iterable[tuple[Place, frozenset[Any]]] = (),
) -> PythonGuards:
    """Guard what a step has read.

    Args:
        module: the user's module, as it was before the step.
        numbers: what the trace knows of tracked numbers.
        slots: places that the step has read.
        varying: places of tracked numbers.
        unread: places of lists and dicts of which the step has not read the content.
        constants: tensors from outside of the step, with the user's line.
        filled: places of dicts, with the keys that the step sets before it looks at all of them.
    """
    varying, unread = tuple(varying), tuple(unread)
    left_out = {slot.place for slot in (*varying, *unread)}
    read = Snapshot((slot for slot in slots if slot.place not in left_out), tree=module, ignored=(*varying, *unread))
    versions = tuple((t, version_of(t), line) for t, line in constants if not t.is_inference())
    return PythonGuards(numbers, read, versions, settings(), tuple(filled))


def settings() -> dict[str, Any]:
    """Return settings of torch that a trace depends on, by name."""
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "precision of matrix products": torch.get_float32_matmul_precision(),
        "determinism": torch.are_deterministic_algorithms_enabled(),
    }
