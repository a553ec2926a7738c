"""Tensors in files that are mapped into memory: the kernel may put them back to the disk at any time."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_pipe.strategy.start.room import room_bytes
from lightning_pipe.units import format_bytes

log = logging.getLogger(__name__)

_ROOM = 4  # times the weights that other ranks have: they come with two states of an optimizer, and a margin
_SMALL_BYTES = 1 << 16  # a process may map some ten thousand files


class MappedTensors:
    """Copies of tensors, in files that are gone with them; small ones stay in memory.

    Args:
        folder: of the files, which nobody sees.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_refused = False

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the host in a file.

        Raises:
            OSError: if there is no room on the disk.
        """
        if tensor.nbytes < _SMALL_BYTES:
            return tensor
        self._folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=self._folder, prefix=".tensor")
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, tensor.nbytes)  # a page without room on the disk would end the process
            storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=tensor.nbytes)
        finally:
            os.close(handle)
            os.unlink(path)
        made = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)  # type: ignore[call-overload]
        copied: torch.Tensor = made.copy_(tensor.detach())
        return copied

    def copied_if_possible(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the host in a file; as it is, like all later ones, and say so once, if that fails."""
        if self._is_refused:
            return tensor
        try:
            return self.copied(tensor)
        except OSError as error:
            self._is_refused = True
            log.warning(
                "Tensors of a checkpoint stay in memory, since %s cannot be written to %s: %s.",
                *(format_bytes(tensor.nbytes), self._folder, error),
            )
            return tensor


def collecting(other_bytes: int, *, root: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what puts tensors for a plain file into files; None where there is room for all of them in memory.

    Args:
        other_bytes: of the weights that other ranks have.
        root: the directory of the training; files are in that for temporary ones if it is on no host.
    """
    if (room := room_bytes()) >= _ROOM * other_bytes:
        return None
    folder = Path(tempfile.gettempdir() if "://" in root else root)
    log.info(
        "A checkpoint is collected in files in %s: other ranks have %s of weights, and there is room for %s.",
        *(folder, format_bytes(other_bytes), format_bytes(max(0, room))),
    )
    return MappedTensors(folder).copied_if_possible
