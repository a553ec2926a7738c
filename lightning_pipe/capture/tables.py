"""Tables of a module: where its parameters, buffers and sub-modules hang, each place once, whatever number of names.

A module object may have several names (`self.last = self.net[-1]`), and one buffer may hang in several modules. A trace
swaps what hangs in a place, so it must know places and not names.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture.hazards import refill


@dataclass(frozen=True)
class Place:
    """A place in a table of parameters or buffers."""

    table: dict[str, Any]
    name: str

    @property
    def content(self) -> torch.Tensor:
        """Return what hangs there."""
        tensor = self.table[self.name]
        assert isinstance(tensor, torch.Tensor), f"{self.name} was a tensor when the places were listed"
        return tensor

    def hang(self, tensor: torch.Tensor) -> None:
        """Hang a tensor there."""
        self.table[self.name] = tensor


def twin_buffers(module: nn.Module) -> dict[str, tuple[Place, ...]]:
    """Return the places of every buffer that hangs in several, by its first name."""
    places: dict[int, list[tuple[str, Place]]] = defaultdict(list)
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                full = f"{path}.{name}" if path else name
                places[id(buffer)].append((full, Place(owner._buffers, name)))
    return {own[0][0]: tuple(place for _, place in own) for own in places.values() if len(own) > 1}


class Tables:
    """What hangs in a module at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [
            (f"{path}." if path else "", table, dict(table))
            for path, owner in module.named_modules()
            for table in (owner._parameters, owner._buffers, owner._modules)
        ]

    def renamed(self) -> list[str]:
        """Return the names that came or went since."""
        return [prefix + name for prefix, table, before in self._tables for name in table.keys() ^ before.keys()]

    def replaced(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield name, content then and content now of everything in whose place something else hangs."""
        for prefix, table, before in self._tables:
            for name in table.keys() & before.keys():
                if table[name] is not before[name]:
                    yield prefix + name, before[name], table[name]

    def restore(self) -> None:
        """Hang everything where it was."""
        for _, table, before in self._tables:
            refill(table, before)


@contextlib.contextmanager
def tables_restored(module: nn.Module) -> Iterator[None]:
    """Hang everything where it was in the end, whatever happens inside."""
    tables = Tables(module)
    try:
        yield
    finally:
        tables.restore()
