"""Where rank 0 collects a plain file: in memory, or in files where memory is short."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from lightning_pipe.strategy.start.mapped import MappedTensors
from lightning_pipe.strategy.start.room import room_bytes
from lightning_pipe.units import format_bytes

log = logging.getLogger(__name__)

_ROOM = 4  # times the weights that other ranks have: they come with two states of an optimizer, and a margin


def collecting(other_bytes: int, *, files: MappedTensors) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what puts tensors for a plain file into files; None where there is room for all of them in memory.

    Args:
        other_bytes: of the weights that other ranks have.
        files: of the training.
    """
    if (room := room_bytes()) >= _ROOM * other_bytes:
        return None
    log.info(
        "A checkpoint is collected in files in %s: other ranks have %s of weights, and there is room for %s.",
        *(files, format_bytes(other_bytes), format_bytes(max(0, room))),
    )
    return files.copied_if_possible
