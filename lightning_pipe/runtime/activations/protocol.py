"""The host of offloaded tensors, whatever it keeps them in.

    parcel = host.take(pieces)      starts the way out
    Wait(parcel.left, ...)          until the pieces are on the host; the caller drops them then
    parcel.fetch()                  starts the way back, which waits for the end of the way out
    Wait(parcel.returned, ...)      until the content is there again
    parcel.storages()               new storages with the content of the pieces, in their order
    parcel.hand_over()              the same, which are the caller's alone from then on

A piece is a range of a storage. What a parcel does not need any more it drops itself: the device's memory when the way
out has ended, that of the host when the way back has. The caller holds the pieces until `left` is done, so that it is
the caller who decides when their memory is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lightning_pipe.runtime.record import Mark
from lightning_pipe.runtime.waiting import Handle


@dataclass(frozen=True)
class StorageRange:
    """Bytes `begin` to `begin + size` of a storage."""

    storage: torch.UntypedStorage
    begin: int
    size: int

    def as_bytes(self) -> torch.Tensor:
        """Return the range as a tensor of bytes that shares its memory."""
        return as_bytes(self.storage).narrow(0, self.begin, self.size)


def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a tensor of bytes that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Parcel(Protocol):
    """Pieces on their way to the host and back."""

    @property
    def left(self) -> Handle:
        """Return what is done when the pieces are on the host."""
        ...

    @property
    def returned(self) -> Handle:
        """Return what is done when they are back."""
        ...

    def fetch(self) -> None:
        """Start the way back."""
        ...

    def storages(self) -> Sequence[torch.UntypedStorage]:
        """Return what the pieces will be in again, from `fetch` until they are handed over."""
        ...

    def hand_over(self) -> Sequence[torch.UntypedStorage]:
        """Return what the pieces are in again, once `returned` is done, and hold it no longer."""
        ...

    def spans(self) -> tuple[tuple[Mark, Mark], ...]:
        """Return begin and end of the copies so far, out and back, once they are done."""
        ...

    def discard(self) -> None:
        """Forget the pieces, wherever they are."""
        ...


class HostStore(Protocol):
    """Keep pieces."""

    def take(self, pieces: Sequence[StorageRange]) -> Parcel:
        """Start the way out."""
        ...

    def close(self) -> None:
        """Give everything back; nothing may be under way."""
        ...
