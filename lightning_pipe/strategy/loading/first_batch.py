"""First batch of the fit, found without disturbing random numbers or the stream of batches.

A plain loader of a map-style data set is asked for its first samples beside its iteration, under a copy of the random
state; what its data set and samplers keep is put back. Any other loader is iterated; its iterator, with the batch, is
used later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_pipe.capture.steps.keyed_random import Randomness
from lightning_pipe.lightning_names import CombinedLoader, isolate_rng, pl, rank_zero_warn
from lightning_pipe.strategy import lightning_private as private
from lightning_pipe.strategy.loading.asked_early import EarlyCall
from lightning_pipe.strategy.loading.batch_loading import FedLoader, Feed
from lightning_pipe.strategy.loading.untouched_data import can_be_put_back, untouched_data
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


@contextlib.contextmanager
def early_loaders(
    trainer: pl.Trainer,
    feed: Feed,
    control: ControlPlane,
    *,
    device: torch.device,
    call: EarlyCall,
    waits: Callable[[Exception], bool],
) -> Iterator[CombinedLoader | None]:
    """Ask for the loaders of a fit before it begins; the feed holds them back. On all ranks together.

    They are opened when the fit begins, where a checkpoint says that it is resumed. What hooks change to make them is
    put by until then. If they draw random numbers (a split of the data), the fit asks for them again, with the random
    state that one device would have then.

    Args:
        trainer: of the fit.
        feed: of its loaders.
        control: to the other ranks.
        device: whose random numbers count.
        call: of the hook that makes them, which comes now.
        waits: whether the fit is to ask when it begins, as asking ends in this error now; else that is raised.
    """
    before = Randomness.now(device)
    with private.progress_of_checkpoint(trainer):
        try:
            loaders = private.train_loaders(trainer)
        except Exception as error:
            if not waits(error):
                raise
            call.put_back()
            feed.forget_early()
            private.forget_train_loaders(trainer)
            yield None
            return
        is_drawn = control.agreed(lambda: Randomness.now(device) != before, source=0, what="how loaders are made")
        yield loaders
    if loaders is None or not _can_all_be_asked(loaders):
        return
    if not is_drawn:
        call.put_by()
    else:
        call.put_back()
        before.restore(device)
        feed.forget_early()
        private.forget_train_loaders(trainer)


def forget_loaders(trainer: pl.Trainer, feed: Feed, *, changed: Sequence[str]) -> None:
    """Let the fit ask for its loaders again when it begins, as something has changed that they are made of."""
    loaders = private.asked_loaders(trainer)
    if loaders is None:  # it will ask anyway
        return
    if not _can_all_be_asked(loaders):
        rank_zero_warn(
            f"{', '.join(changed)} has changed since train_dataloader was called, which is before the fit begins, to "
            "plan for its first batch. The loader is a stream, of which a part may be read: it stays as it was made. "
            "Set what it depends on in `setup`, or earlier."
        )
        return
    feed.forget_early()
    private.forget_train_loaders(trainer)


def _can_all_be_asked(loaders: CombinedLoader) -> bool:
    return all(can_be_asked(loader.loader) for loader in loaders.flattened)


def look_where_iterated(trainer: pl.Trainer, loaders: CombinedLoader) -> None:
    """Begin the iteration of loaders that cannot be asked beside it. On all ranks together.

    Raises:
        StopIteration: if one of them gives no batch.
    """
    for loader in loaders.flattened:
        if loader.first is None and not can_be_asked(loader.loader):
            private.tell_epoch(trainer, loader)
            loader.look()


def peek(loaders: CombinedLoader) -> Any:
    """Return the first batch that the loaders will give, after `look_where_iterated`. On any rank.

    Raises:
        StopIteration: if one of them gives none.
    """
    return apply_to_collection(loaders.iterables, FedLoader, _first)


def _first(loader: FedLoader) -> Any:
    if loader.first is None and not can_be_asked(loader.loader):  # it was looked at, and gives none
        raise StopIteration
    return _ask(loader.loader) if loader.first is None else loader.first


def can_be_asked(loader: Any) -> bool:
    """Return whether samples can be taken without a trace: torch's loader, and a data set with indices."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and (_has_torchs_samplers(loader) or can_be_put_back(loader))
    )


def _has_torchs_samplers(loader: DataLoader[Any]) -> bool:
    return type(loader.sampler) in _SAMPLERS and type(loader.batch_sampler) in (BatchSampler, type(None))


def _ask(loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset
    with isolate_rng(), untouched_data(loader):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # an iteration begins with a seed
        if loader.batch_sampler is None:
            return loader.collate_fn(dataset[next(iter(loader.sampler))])
        indices = next(iter(loader.batch_sampler))
        if hasattr(dataset, "__getitems__"):
            return loader.collate_fn(dataset.__getitems__(indices))
        return loader.collate_fn([dataset[index] for index in indices])
