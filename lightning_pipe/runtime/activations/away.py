"""Values of one micro-batch that are away: their forms, and the parcel with their memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lightning_pipe.runtime.activations.protocol import HostStore, Parcel, StorageRange


@dataclass(frozen=True)
class _Form:
    """What a tensor is of a piece: its type and form, and how far behind the piece's begin it begins, in elements."""

    piece: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Away:
    """Tensors whose memory is away, by name; several may be views of one memory.

    Attributes:
        parcel: their memory on its way.
        forms: what each tensor is of it.
        leaving: what the parcel is copied from, until `vacate`.
    """

    parcel: Parcel
    forms: Mapping[str, _Form]
    leaving: list[StorageRange]

    def vacate(self) -> None:
        """Give up the memory that has been copied; the way out has ended."""
        self.leaving.clear()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors in their new memory, once it is back; it lives as long as they do."""
        storages = self.parcel.hand_over()
        return {name: _formed(storages[form.piece], form) for name, form in self.forms.items()}

    def held(self) -> dict[int, int]:
        """Return address and bytes of the memory that is there: the old until `vacate`, the new until `tensors`."""
        old = {piece.storage.data_ptr() + piece.begin: piece.size for piece in self.leaving}
        return old | {storage.data_ptr(): storage.nbytes() for storage in self.parcel.storages()}


def send_away(tensors: Mapping[str, torch.Tensor], host: HostStore, *, slices: Mapping[int, tuple[int, int]]) -> Away:
    """Start to copy the memory behind tensors to a host, each memory once.

    Args:
        tensors: dense ones, by name.
        host: where they go.
        slices: by storage, address and bytes of what is copied of it, where that is not all.
    """
    pieces: dict[int, StorageRange] = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        address, size = slices.get(storage.data_ptr(), (storage.data_ptr(), storage.nbytes()))
        pieces[storage.data_ptr()] = StorageRange(storage, address - storage.data_ptr(), size)
    numbers = {address: number for number, address in enumerate(pieces)}
    forms = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        offset = int(tensor.storage_offset()) - pieces[address].begin // tensor.element_size()
        forms[name] = _Form(numbers[address], tensor.dtype, tensor.size(), tensor.stride(), offset)
    leaving = list(pieces.values())
    return Away(host.take(leaving), forms, leaving)


def _formed(storage: torch.UntypedStorage, form: _Form) -> torch.Tensor:
    empty = torch.empty(0, dtype=form.dtype, device=storage.device)
    return empty.set_(storage, form.offset, form.size, form.stride)
