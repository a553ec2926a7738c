"""Make the plain file of Lightning from a sharded checkpoint, with the memory of one tensor.

Tensors are copied one by one into files that are mapped into memory, from which torch writes them. It takes the size of
the checkpoint twice on the disk, for that long.
"""

from __future__ import annotations

from pathlib import Path

import torch
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_pipe.disk import write_failure
from lightning_pipe.errors import CheckpointError, ConfigError
from lightning_pipe.strategy.checkpoints import sharded
from lightning_pipe.strategy.checkpoints.saving import save_plain
from lightning_pipe.strategy.start.mapped import MappedTensors
from lightning_pipe.strategy.start.unread import Unread


def consolidate(directory: Path, out: Path, *, weights_only: bool = True) -> int:
    """Write the plain file of a sharded checkpoint, and return its bytes.

    Args:
        directory: the checkpoint.
        out: the file.
        weights_only: as of `torch.load`: False unpickles any object, which can run code.

    Raises:
        CheckpointError: if it cannot be read or written.
        ConfigError: if the directory is none.
    """
    if not sharded.is_sharded(directory):
        raise ConfigError(
            f"found no sharded checkpoint in {directory}; expected a directory with a file .metadata, as "
            "save_distributed_checkpoint=True writes it."
        )
    checkpoint = sharded.load(directory, weights_only=weights_only)
    mapped = MappedTensors(out.absolute().parent)
    made: dict[int, torch.Tensor] = {}  # what hangs in several places stays one tensor

    def read(unread: Unread) -> torch.Tensor:
        if id(unread) not in made:
            values = unread.read()
            try:
                made[id(unread)] = mapped.copied(values)
            except OSError as error:
                failure = write_failure(error, out, values.nbytes)
                raise CheckpointError(f"{directory} cannot be made a plain file: {failure}.") from error
        return made[id(unread)]

    save_plain(out, apply_to_collection(checkpoint, Unread, read))
    return out.stat().st_size
