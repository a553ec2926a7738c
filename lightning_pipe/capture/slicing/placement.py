"""How the micro-batches of a batch hold a value, as DTensor holds one on a mesh whose dimension is laid out in time.

    Rows    every micro-batch has the rows of its samples               DTensor's `Shard`, `_StridedShard`
    TERMS   every micro-batch has a term; the value is their sum        DTensor's `Partial`
    WHOLE   one value: of no sample, or of all of them                  DTensor's `Replicate`
    LOCAL   every micro-batch has a value of its own, which makes none of the batch (statistics of a batch norm)

Rows are cut out of a whole value for nothing. To put rows together, or to add terms, is to wait for all micro-batches:
a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch


@dataclass(frozen=True)
class Rows:
    """Rows of samples in a dimension of `outer * samples * per_sample` elements.

    Attributes:
        dim: the dimension.
        outer: how often all samples follow each other in it, as in `cat([z1, z2])`.
        per_sample: elements of a sample that lie next to each other in it, such as flattened tokens.
    """

    dim: int
    outer: int = 1
    per_sample: int = 1

    def size(self, samples: int) -> int:
        """Return the elements of the dimension for so many samples."""
        return self.outer * samples * self.per_sample

    def cut(self, value: torch.Tensor, *, start: int, samples: int, total: int) -> torch.Tensor:
        """Return the rows of the samples from `start` on, out of those of `total` samples."""
        blocks: torch.Tensor = value.unflatten(self.dim, (self.outer, total, self.per_sample))
        return blocks.narrow(self.dim + 1, start, samples).flatten(self.dim, self.dim + 2)

    def blocks(self, value: torch.Tensor, samples: int) -> torch.Tensor:
        """Return the rows of so many samples in blocks of `(samples, ..., outer, per_sample, ...)`."""
        split: torch.Tensor = value.unflatten(self.dim, (self.outer, samples, self.per_sample))
        return split.movedim(self.dim + 1, 0).contiguous()

    def join(self, parts: Sequence[torch.Tensor], samples: Sequence[int]) -> torch.Tensor:
        """Put the rows of micro-batches with so many samples together."""
        blocks = [
            part.unflatten(self.dim, (self.outer, count, self.per_sample))
            for part, count in zip(parts, samples, strict=True)
        ]
        return torch.cat(blocks, self.dim + 1).flatten(self.dim, self.dim + 2)


class Kind(Enum):
    """The ways of holding a value without rows; the module says what they mean."""

    TERMS = "terms"
    WHOLE = "whole"
    LOCAL = "local"


TERMS, WHOLE, LOCAL = Kind.TERMS, Kind.WHOLE, Kind.LOCAL
Placement = Rows | Kind
Placements = Placement | tuple[Placement, ...]  # a tuple for an operator with several results


def is_of_microbatch(placement: Placements) -> bool:
    """Return whether every micro-batch makes the value, or one of several results."""
    several = placement if isinstance(placement, tuple) else (placement,)
    return any(placement is not WHOLE for placement in several)
