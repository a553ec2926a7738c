"""Tensors in files that are mapped into memory: the kernel may put them back to the disk at any time."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_pipe.lightning_names import pl
from lightning_pipe.units import format_bytes

log = logging.getLogger(__name__)

_SMALL_BYTES = 1 << 16  # a process may map some ten thousand files


class MappedTensors:
    """Tensors of the host, in files that are gone with them; small ones are in memory.

    Args:
        folder: of the files, which nobody sees.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_refused = False

    @classmethod
    def near(cls, module: pl.LightningModule) -> MappedTensors:
        """Return tensors in files of the directory of a module's training; of temporary ones if that is not local."""
        root = ""
        with contextlib.suppress(RuntimeError):  # it has no trainer
            root = module.trainer.default_root_dir
        return cls(Path(root if root and "://" not in root else tempfile.gettempdir()))

    def __str__(self) -> str:
        return str(self._folder)

    def free_bytes(self) -> int:
        """Return what the disk has left; 0 where there can be no files."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return shutil.disk_usage(self._folder).free
        except OSError:
            return 0

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the host in a file.

        Raises:
            OSError: if there is no room on the disk.
        """
        if tensor.nbytes < _SMALL_BYTES:
            return tensor
        copied: torch.Tensor = self._made(tensor).copy_(tensor.detach())
        return copied

    def copied_if_possible(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the host in a file; as it is, like all later ones, and say so once, if that fails."""
        copied = self._made_in_file(self.copied, tensor)
        return tensor if copied is None else copied

    def zeros_if_possible(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return zeros in a file, as many as a tensor of the host has elements; None if it is small, or that fails."""
        return None if tensor.nbytes < _SMALL_BYTES else self._made_in_file(self._made, tensor)

    def _made_in_file(self, make: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what is made in a file; None, for all later ones too, if that fails, which is said once."""
        if self._is_refused:
            return None
        try:
            return make(tensor)
        except OSError as error:
            self._is_refused = True
            log.warning(
                "Tensors stay in memory, since %s cannot be written to %s: %s.",
                *(format_bytes(tensor.nbytes), self._folder, error),
            )
            return None

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return zeros of this shape and type in a file."""
        self._folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=self._folder, prefix=".tensor")
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, tensor.nbytes)  # a page without room on the disk would end the process
            storage = torch.UntypedStorage.from_file(path, shared=True, nbytes=tensor.nbytes)
        finally:
            os.close(handle)
            os.unlink(path)
        made: torch.Tensor = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)  # type: ignore[call-overload]
        return made
