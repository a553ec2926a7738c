"""Inputs and outcome of one run of a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lightning_pipe.core.program import Samples
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.runtime.exchanges.slicing import Content


@dataclass(frozen=True)
class BatchInput:
    """One batch.

    Attributes:
        leaves: flattened leaves of the whole batch on ranks that load, None in their place elsewhere.
        cut: which leaves are cut into samples along `batch_dim`; the others are given whole.
        offsets: first sample of each micro-batch within the batch.
        weight: share of this batch in the step's loss (below 1 where gradients are accumulated over batches), times
            the scale of a gradient scaler.
        seed: seed of the random numbers.
        step: number of the batch, part of the random numbers' key.
        batch_dim: dimension of the samples in the leaves.
        is_skipped: whether this is a batch of the training whose program makes no gradients, but may change state.
        samples: of the batch; 0: those of all micro-batches of the program.
        buffers: content, by name, of buffers that the batch has for itself.
        following: the next batch, whose forwards may begin in this round; None if the program runs none.
    """

    leaves: tuple[Content | None, ...]
    cut: tuple[bool, ...]
    offsets: tuple[int, ...]
    weight: float = 1.0
    seed: int = 0
    step: int = 0
    batch_dim: int = 0
    is_skipped: bool = False
    samples: int = 0
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    following: BatchInput | None = None

    def of(self, microbatch: int) -> tuple[BatchInput, int]:
        """Return the batch of a micro-batch of a round, and its number in that batch."""
        count = len(self.offsets)
        if microbatch < count or self.following is None:
            return self, microbatch
        return self.following.of(microbatch - count)


@dataclass(frozen=True)
class ResultSlice:
    """A result of one slice of a micro-batch."""

    microbatch: int
    samples: Samples
    content: Content


@dataclass(frozen=True)
class ProgramResult:
    """What one rank has after a program.

    Attributes:
        results: pieces of the step's outputs that this rank produced, by value name, in the order of its computes.
        timeline: events of this rank, empty unless recorded.
        memory: (time, bytes held by the stages of this rank from then on), on the clock of the timeline; empty unless
            recorded.
        given_up: whether the program was left before the first backward, since the step before it was not right.
    """

    results: Mapping[str, tuple[ResultSlice, ...]]
    timeline: Timeline
    memory: tuple[tuple[float, int], ...] = ()
    given_up: bool = False
