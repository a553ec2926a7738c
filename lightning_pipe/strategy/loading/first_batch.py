"""First batch of the fit, found without disturbing random numbers or the stream of batches.

A plain loader of a map-style data set with one of torch's own samplers is asked for its first samples beside its
iteration, under a copy of the random state. Any other loader is iterated; its iterator, with the batch, is used later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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

from lightning_pipe.lightning_names import CombinedLoader, isolate_rng
from lightning_pipe.strategy.loading.batch_loading import FedLoader

_SAMPLERS = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def look_where_iterated(loaders: CombinedLoader) -> None:
    """Begin the iteration of loaders that cannot be asked beside it. On all ranks together.

    Raises:
        StopIteration: if one of them gives no batch.
    """
    for loader in loaders.flattened:
        if loader.first is None and not _can_be_asked(loader.loader):
            loader.look()


def peek(loaders: CombinedLoader) -> Any:
    """Return the first batch that the loaders will give, after `look_where_iterated`. On any rank.

    Raises:
        StopIteration: if one of them gives none.
    """
    return apply_to_collection(loaders.iterables, FedLoader, _first)


def _first(loader: FedLoader) -> Any:
    return _ask(loader.loader) if loader.first is None else loader.first


def _can_be_asked(loader: Any) -> bool:
    """Return whether samples can be taken without a trace: torch's loader and samplers, and a data set with indices."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.sampler) in _SAMPLERS
        and (loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler)
    )


def _ask(loader: DataLoader[Any]) -> Any:
    dataset: Any = loader.dataset
    with isolate_rng(), _same_generators(loader):
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # an iteration begins with a seed
        if loader.batch_sampler is None:
            return loader.collate_fn(dataset[next(iter(loader.sampler))])
        indices = next(iter(loader.batch_sampler))
        if hasattr(dataset, "__getitems__"):
            return loader.collate_fn(dataset.__getitems__(indices))
        return loader.collate_fn([dataset[index] for index in indices])


@contextlib.contextmanager
def _same_generators(loader: DataLoader[Any]) -> Iterator[None]:
    """Give the generators of the loader and its sampler their state back."""
    found = (getattr(loader, "generator", None), getattr(loader.sampler, "generator", None))
    generators = [g for g in found if isinstance(g, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
