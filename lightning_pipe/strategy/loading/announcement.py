"""Announcement of the next batch, by which ranks that load for themselves know that they load the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from lightning_pipe.strategy.loading.known_structures import UNKNOWN

_MOST_VALUES = 8  # values per tensor that enter a checksum
BATCH, END, FAILED = 1, 2, 3


@dataclass(frozen=True)
class Announcement:
    """What there is on a rank: a batch (checksum, structure), an end, a failure; at which place of which iteration.

    If loading has drawn random numbers, the state of the generators follows, which takes `random_bytes`.
    """

    code: int
    checksum: int
    iteration: int
    batch: int
    structure: int = UNKNOWN
    random_bytes: int = field(default=0, compare=False)

    @property
    def values(self) -> list[int]:
        """Return the fields in their order."""
        return [self.code, self.checksum, self.iteration, self.batch, self.structure, self.random_bytes]


def checksum(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number that other data would hardly have: of shapes and of a few values of every tensor."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(str(tuple(tensor.shape)).encode(), total)
        if tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel():
            flat = tensor.detach().reshape(-1)
            few = flat[:: max(1, len(flat) // _MOST_VALUES)][:_MOST_VALUES].contiguous()
            total = zlib.crc32(few.view(torch.uint8).numpy().tobytes(), total)
    return total
