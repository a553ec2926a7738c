"""Training batches that are fetched and moved to the device before their turn, so that forwards may run ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lightning_pipe.capture import Structure, flatten
from lightning_pipe.lightning_names import pl
from lightning_pipe.strategy import lightning_private as private
from lightning_pipe.strategy.loading.batch_loading import Awaited, Feed, StatefulFedLoader
from lightning_pipe.strategy.loading.left_by_hooks import LeftForTurn
from lightning_pipe.strategy.versions.noted_contents import any_of, unlike


class AheadBatch(Awaited):
    """Stand, until its turn, for a batch that is on the device already.

    Args:
        content: the batch.
        structure: its structure, as all ranks know it.
        left: what hooks of its transfer have left for its step.
        loads: whether this rank has its tensors.

    Attributes:
        content, structure, left: as given.
        tensors: copies that forwards ahead read, so that hooks may write to the batch; None on ranks that do not load.
    """

    def __init__(self, content: Any, structure: Structure, left: LeftForTurn, *, loads: bool) -> None:
        self.content, self.structure, self.left = content, structure, left
        self.tensors = tuple(tensor.detach().clone() for tensor in flatten(content)[0]) if loads else None

    def has_changed(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return whether the batch has other tensors by its turn than forwards ahead have read."""
        assert self.tensors is not None, "asked where the batch was loaded"
        return torch.as_tensor(any_of(map(unlike, self.tensors, tensors)))


def copied(batch: Any) -> Any:
    """Return a batch with memory of its own: a loader may fill the same memory with the next one."""
    tensors, structure = flatten(batch)
    copies = {id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors}
    return structure.fill([copies[id(tensor)] for tensor in tensors])


@dataclass
class AheadBatches:
    """The batches behind the one at hand, of one fit.

    Ranks that load do not begin a batch together with the others: the last stage is the first to end one. So they
    fetch one batch more than forwards need, and the others hear of it when they need it: without waiting.

    Args:
        module: whose trainer fetches batches.
        feed: who loads.
        receive: returns a batch on the device, for a batch and what hooks have left for those between it and the one
            at hand.
    """

    module: pl.LightningModule
    feed: Feed
    receive: Callable[[Any, Sequence[LeftForTurn]], AheadBatch]
    _is_behind: bool = False  # of what ranks that load have told

    def look(self, count: int, *, goes_further: Callable[[Sequence[AheadBatch]], bool]) -> list[AheadBatch]:
        """Return the next batches, at most so many; on all ranks alike.

        Args:
            count: of the batches.
            goes_further: returns whether ranks that load fetch one more, for these batches; alike on all ranks.
        """
        self.feed.random.resume()
        batches: list[AheadBatch] = []
        while len(batches) < count and (batch := self._at(len(batches), batches)) is not None:
            batches.append(batch)
        if len(batches) < count or not goes_further(batches):
            self.catch_up()
        elif self.feed.loads:
            with self.feed.random.put_by(), self.feed.out_of_turn():
                self._at(count, batches)
        else:
            self._is_behind = True
        return batches

    def catch_up(self) -> None:
        """Hear of what ranks that load have fetched already, before they tell of anything else."""
        self.feed.random.resume()
        if self._is_behind:
            waiting = private.fetched_early(self.module.trainer) or []
            self._at(len(waiting), [batch for batch in waiting if isinstance(batch, AheadBatch)])

    def _at(self, place: int, earlier: Sequence[AheadBatch]) -> AheadBatch | None:
        """Return the batch at a place, which comes behind earlier ones; None if there is none."""
        with self.feed.out_of_turn() if self._is_behind else nullcontext():
            batch = private.peek_at(self.module.trainer, place, self._states)
            if isinstance(batch, AheadBatch):
                return batch
            self._is_behind = False
            if batch is private.NO_BATCH:
                return None
            received = self.receive(batch, [one.left for one in earlier])
        private.put_ahead(self.module.trainer, place, received)
        return received

    def _states(self) -> dict[int, Any]:
        """Return the states of loaders that can be resumed, on a rank that loads, by identity."""
        loaders = private.training_loaders(self.module.trainer)
        stateful = [one for one in loaders if isinstance(one, StatefulFedLoader) and one.feed.loads]
        return {id(one): one.noted_state() for one in stateful}

    def state_of(self, loader: StatefulFedLoader) -> dict[str, Any] | Exception | None:
        """Return the state of a loader before batches were fetched early; None if that is its present one."""
        return (private.noted_ahead(self.module.trainer) or {}).get(id(loader))


def steps_before(trainer: pl.Trainer, count: int) -> int:
    """Return how many optimizer steps there are before the turn of the batch that comes so many later."""
    batch, every = trainer.fit_loop.batch_idx, trainer.accumulate_grad_batches
    return (batch + count) // every - batch // every


def batches_left(trainer: pl.Trainer) -> int:
    """Return how many training batches may follow the one at hand before something else does."""
    loop = trainer.fit_loop
    batch, every = loop.epoch_loop.batch_progress.current.ready - 1, trainer.accumulate_grad_batches
    left = loop.max_batches - 1 - batch
    if trainer.max_steps >= 0:
        steps = trainer.max_steps - trainer.global_step
        left = min(left, steps * every - batch % every - 1)
    return max(0, int(min(left, 1 << 30)))
