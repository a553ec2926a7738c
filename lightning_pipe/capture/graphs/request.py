"""Request for a capture: which step, on which device, with which batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_pipe.capture.python.places import Place
from lightning_pipe.capture.steps.batch import Structure
from lightning_pipe.errors import BatchError
from lightning_pipe.lightning_names import pl

Answers = Callable[[], tuple[bool, ...]]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Request:
    """What is to be captured.

    Attributes:
        module: the user's module, in the mode (train or eval) that is wanted.
        method: name of the step method.
        structure: the batch without its data, of any number of samples.
        arguments: positional arguments after the batch.
        samples: number of samples to trace with, at least 2 for a symbolic trace; None for a batch that cannot be cut
            into samples: it is traced as it is, and the graph holds for its shapes only.
        batch_dim: dimension of the samples.
        device: device on which the step will run.
        context: created for every run of the step (autocast of the precision plug-in).
        answers: runs the step on real tensors and returns its truth values; None where no real run is possible.
        symbolic: whether the number of samples is a symbol of the graph.
        lengths: (tensor of the batch, dimension) of sizes that are symbols, too (`capture.graphs.lengths`).
        varying: places of numbers that are known to change from step to step.
        may_skip: whether a training step may return None, and so skip its batch.
        answered: truth values of the first questions that the step asks of its tensors, where they are known.
        whole_batch: "auto", "exact" or "by_microbatch": what happens where gradients need all samples of the batch.
        uncut: why its batches are not cut into micro-batches, in words after "since"; "" if they may be.
        kept: folder of graphs that were traced before (`capture.kept_graphs`); None if none are kept.
    """

    module: pl.LightningModule
    method: str
    structure: Structure
    arguments: tuple[int, ...] = (0,)
    samples: int | None = 2
    batch_dim: int = 0
    device: torch.device = _CPU
    context: Context = contextlib.nullcontext
    answers: Answers | None = None
    symbolic: bool = True
    lengths: frozenset[tuple[int, int]] = frozenset()
    varying: tuple[Place, ...] = ()
    may_skip: bool = False
    answered: tuple[bool, ...] = ()
    whole_batch: str = "auto"
    uncut: str = ""
    kept: Path | None = None

    @property
    def total(self) -> int:
        """Return the number of samples of the whole batch; 0 if it cannot be cut."""
        return self.total_of(self.structure)

    def total_of(self, structure: Structure) -> int:
        """Return the number of samples of another batch; 0 if it cannot be cut."""
        with contextlib.suppress(BatchError):
            return structure.samples(self.batch_dim)
        return 0

    @property
    def count(self) -> int:
        """Return the number of samples of the traced batch; that of its first tensor if it cannot be cut."""
        if self.samples is not None:
            return self.samples
        dim = self.batch_dim
        return next((leaf.shape[dim] for leaf in self.structure.leaves if len(leaf.shape) > dim), 1)


def takes_all_samples(names: Sequence[str]) -> str:
    """Return why batches are not cut with `whole_batch="exact"`, in words after "since"."""
    return f"{', '.join(names)} takes all samples of the batch (whole_batch='exact')"
