"""Make the plain file of Lightning from a sharded checkpoint, with the memory of one tensor.

Tensors are copied one by one into files that are mapped into memory, from which torch writes them. It takes the size of
the checkpoint twice on the disk, for that long.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipe.errors import ConfigError
from lightning_pipe.strategy.checkpoints import sharded
from lightning_pipe.strategy.checkpoints.saving import save_plain
from lightning_pipe.strategy.start.unread import Unread


def consolidate(directory: Path, out: Path) -> int:
    """Write the plain file of a sharded checkpoint, and return its bytes.

    Raises:
        ConfigError: if the directory is none.
    """
    if not sharded.is_sharded(directory):
        raise ConfigError(
            f"found no sharded checkpoint in {directory}; expected a directory with a file .metadata, as "
            "save_distributed_checkpoint=True writes it."
        )
    checkpoint = sharded.load(directory, weights_only=False)
    with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as folder:
        save_plain(out, apply_to_collection(checkpoint, Unread, _Mapped(Path(folder)).copied))
    return out.stat().st_size


class _Mapped:
    """Tensors in files, which the kernel may put back to the disk at any time.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[int, torch.Tensor] = {}  # by the id of what was copied, which the checkpoint keeps

    def copied(self, unread: Unread) -> torch.Tensor:
        """Return a copy in a file; the same one for what hangs in several places."""
        if id(unread) not in self._made:
            path, size = self._folder / str(len(self._made)), max(1, unread.nbytes)
            path.touch()
            storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
            made = torch.empty(0, dtype=unread.dtype).set_(storage, 0, unread.shape)  # type: ignore[call-overload]
            self._made[id(unread)] = made.copy_(unread.read())
        return self._made[id(unread)]
