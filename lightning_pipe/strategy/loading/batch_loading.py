"""Batch loading: which rank loads which batch, and how the other ranks learn of it.

Ranks of the first stage load, each the whole batch in the order of a single device; the other ranks follow: they load
nothing and get stand-ins. Until there is a plan every rank loads for itself.

    Feed.wrap(loader)     every loader of the trainer; an iteration begins and ends on all ranks together
    Feed.assign(ranks)    the plan is known: these ranks load from now on
    Feed.share(batch)     after the user's transfer hooks: tell the structure; followers get a batch of stand-ins

Per batch two small messages go from the first loading rank to all others: that there is one, and its structure (its
number, once it is known). Where ranks run ahead, it does not wait until they have arrived.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import pickle
import random
import zlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from lightning_pipe.capture.steps.batch import Structure, flatten
from lightning_pipe.errors import BatchError, PipelineError
from lightning_pipe.lightning_names import pl_worker_init_function
from lightning_pipe.runtime.guard.guarded_watch import GuardedWatch
from lightning_pipe.runtime.guard.watch import MismatchError, Unwatched
from lightning_pipe.strategy.loading.samplers import gather_shards
from lightning_pipe.strategy.loading.world_size import WholeData
from lightning_pipe.strategy.parameters.stand_ins import absent_batch
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

_HOST = torch.device("cpu")
_FEW_RANKS = 8  # to which the first tells what it has in less time than it takes to pass it on
_MOST_STRUCTURES = 256
_MOST_VALUES = 8  # values per tensor that enter a checksum
_BATCH, _END, _FAILED = 1, 2, 3


@runtime_checkable
class _Stateful(Protocol):
    """A loader that can be resumed, as Lightning recognises it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Awaited:
    """Stand for a batch that other ranks have loaded, until its structure is known."""


class Feed:
    """Feed batches to one rank.

    Args:
        control: to the other ranks.
        ahead: whether ranks may go on before the others have heard of a batch; where there are few, they do anyway.
        device: where this rank computes.
        watch: looks after the loading of batches, and after workers of loaders.

    Attributes:
        data: answers code of loaders that asks for its rank.
        tells_indices: whether all ranks are told which samples a batch has, for writers of predictions.
    """

    def __init__(
        self,
        control: ControlPlane,
        *,
        ahead: bool = False,
        device: torch.device = _HOST,
        watch: GuardedWatch | Unwatched | None = None,
    ) -> None:
        self._control, self._device = control, device
        self.watch = watch or Unwatched()
        self.data = WholeData(ranks=control.ranks)
        self._tell = control.tell if ahead or control.ranks <= _FEW_RANKS else control.copy
        self._loading = tuple(range(control.ranks))
        self._assigned = False
        self._early: list[FedIterator] = []
        self.tells_indices = False
        self._structures: dict[bytes, int] = {}
        self._known: list[Structure] = []
        self._iterations = 0

    @property
    def loads(self) -> bool:
        """Return whether this rank loads batches."""
        return self._control.rank in self._loading

    @property
    def assigned(self) -> bool:
        """Return whether it is decided who loads."""
        return self._assigned

    @property
    def source(self) -> int:
        """Return the rank whose batches are those of all."""
        return self._loading[0]

    @property
    def leads(self) -> bool:
        """Return whether this rank's batches are those of all."""
        return self._control.rank == self.source

    @property
    def compares(self) -> bool:
        """Return whether several ranks load what must be the same."""
        return self._assigned and len(self._loading) > 1

    def wrap(self, loader: Any) -> FedLoader:
        """Return a loader that is iterated on all ranks together."""
        if isinstance(loader, FedLoader):
            return loader
        gather_shards(loader)
        if getattr(loader, "worker_init_fn", False) is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
            # Lightning would seed workers by rank; ranks that load must load the same, namely what rank 0 would
            loader.worker_init_fn = functools.partial(pl_worker_init_function, rank=0)
        return StatefulFedLoader(loader, self) if isinstance(loader, _Stateful) else FedLoader(loader, self)

    def assign(self, ranks: tuple[int, ...]) -> None:
        """Decide which ranks load; iterations that have begun go on there and end elsewhere."""
        self._loading, self._assigned = ranks, True
        for iterator in self._early:
            iterator.follow_assignment()
        self._early.clear()

    def state_of(self, loader: StatefulFedLoader) -> dict[str, Any]:
        """Return the state of a loader on the first loading rank."""
        state = loader.loader.state_dict() if self.leads else {}
        return self._control.broadcast(state, source=self.source, what="the state of a loader")

    def iterate(self, loader: FedLoader) -> FedIterator:
        """Begin an iteration."""
        iterator = FedIterator(loader, self, number=self._iterations)
        self._iterations += 1
        if self._assigned:
            iterator.follow_assignment()
        else:
            self._early.append(iterator)  # opened when it is needed, or when it is known who loads
        return iterator

    def same_randomness(self) -> None:
        """Give the loading ranks the random state of the first of them, so that they shuffle alike."""
        if len(self._loading) == 1:
            return
        mine = (torch.get_rng_state(), random.getstate(), np.random.get_state())
        ours = self._control.broadcast(mine, source=self.source, what="the random state of the loading ranks")
        if self.loads:
            torch.set_rng_state(ours[0])
            random.setstate(ours[1])
            np.random.set_state(ours[2])

    def announce(self, code: int, checksum: int, *, place: tuple[int, int]) -> int:
        """Tell, or hear, whether there is another batch, and compare it with the first loading rank's.

        Args:
            code: what there is here.
            checksum: of the batch.
            place: numbers of the iteration and of the batch in it.
        """
        mine = torch.tensor([code, checksum, *place])
        told, expected, *there = self._tell(mine.clone(), source=self.source, what="the next batch").tolist()
        mine = mine[:2]
        if tuple(there) != place:
            raise MismatchError.of(
                f"rank {self._control.rank} for batch {place[1]} of loader {place[0]}, rank {self.source} for batch "
                f"{there[1]} of loader {there[0]} (in the order in which loaders were begun)"
            )
        if told == _FAILED and code != _FAILED:
            self.watch.hear()
            raise PipelineError(f"Rank {self.source} failed to load a batch; its own error says why.")
        if self.loads and code != _FAILED and [told, expected] != mine.tolist():
            found = "other data" if told == code else "another number of batches"
            raise BatchError(
                f"Rank {self._control.rank} loaded {found} than rank {self.source}; the replicas of the first stage "
                "need the same batches. Call seed_everything(seed, workers=True), draw random numbers of the data set "
                "from torch's, NumPy's or Python's generator, or give the first stage one rank."
            )
        return int(told)

    def share_indices(self, loader: Any, number: int) -> None:
        """Tell, or hear, which samples the batch of this number has, where Lightning's sampler of batches says so."""
        sampler: Any = getattr(loader, "batch_sampler", None)
        if not self.tells_indices or self._control.ranks == 1:
            return
        seen = getattr(sampler, "seen_batch_indices", [])
        mine = seen[number] if self.leads and number < len(seen) else None
        indices = self._control.broadcast(mine, source=self.source, what="the indices of a batch")
        if indices is not None and not self.loads:
            sampler.seen_batch_indices = [*seen[:number], indices]

    def share(self, batch: Any) -> tuple[Any, Structure]:
        """Return the batch and its structure; on ranks that do not load, a batch of stand-ins."""
        if self._control.ranks == 1:
            return batch, flatten(batch)[1]
        packed, number = b"", -1
        if self.loads:
            structure = flatten(batch)[1]
        if self.leads:
            packed = _packed(structure)
            number = self._structures.get(packed, -1)
        number = int(self._tell(torch.tensor([number]), source=self.source, what="the structure of a batch"))
        if number < 0:
            number = self._learn(packed)
        known = self._known[number]
        if self.loads:
            return batch, structure
        return absent_batch(known, ranks=self._loading, rank=self._control.rank, device=self._device), known

    def _learn(self, packed: bytes) -> int:
        """Tell, or hear, a structure that was not met before."""
        packed = self._control.broadcast(packed, source=self.source, what="the structure of a batch")
        if len(self._known) == _MOST_STRUCTURES:
            self._structures.clear()
            self._known.clear()
        self._structures[packed] = len(self._known)
        self._known.append(pickle.loads(packed))
        return len(self._known) - 1


def _packed(structure: Structure) -> bytes:
    try:
        return pickle.dumps(structure)
    except Exception as error:
        raise BatchError(
            f"The batch holds something that cannot be sent to the other ranks: {error}. Return tensors, numbers, "
            "strings and containers of them from the collate function."
        ) from error


class FedLoader:
    """A loader whose iterations happen on all ranks together; everything else is the wrapped loader's.

    Args:
        loader: the user's loader.
        feed: says whether this rank loads.
    """

    _OWN = frozenset({"loader", "feed", "first", "peeked"})
    loader: Any
    feed: Feed
    first: Any  # the first batch, while every rank loads for itself
    peeked: Iterator[Any] | None  # an iterator that was opened to look at its first batch, which it gives again

    def __init__(self, loader: Any, feed: Feed) -> None:
        vars(self).update(loader=loader, feed=feed, first=None, peeked=None)

    def __iter__(self) -> FedIterator:
        return self.feed.iterate(self)

    def __len__(self) -> int:
        with self.feed.data.while_loading():
            return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in FedLoader._OWN or (name.startswith("__") and not name.startswith("__pl_")):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FedLoader._OWN:
            vars(self)[name] = value
        else:
            setattr(self.loader, name, value)

    def open(self) -> Iterator[Any]:
        """Return an iterator of the wrapped loader: the one whose first batch was looked at, or a new one."""
        peeked, self.peeked = self.peeked, None
        if peeked is not None:
            return peeked
        with self.feed.data.while_loading():
            opened: Iterator[Any] = iter(self.loader)
        self.feed.watch.watch_processes(_workers())
        return opened

    def look(self) -> Any:
        """Return the first batch of the iteration that comes next, or has begun; on all ranks together.

        Raises:
            StopIteration: if there is none.
        """
        if self.first is None:
            self.feed.same_randomness()
            iterator = self.open()
            self.first = next(iterator)
            self.peeked = itertools.chain([self.first], iterator)
        return self.first


class StatefulFedLoader(FedLoader):
    """A loader that can be resumed in the middle of an epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader that gives the batches."""
        return self.feed.state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state of this rank's loader."""
        self.loader.load_state_dict(state)


class FedIterator:
    """One iteration of a loader."""

    def __init__(self, loader: FedLoader, feed: Feed, *, number: int) -> None:
        self._loader = loader
        self._feed = feed
        self._number = number
        self._begun = False
        self._batches = 0
        self._own: Iterator[Any] | None = None

    def __iter__(self) -> FedIterator:
        return self

    def __next__(self) -> Any:
        if not self._begun:
            self._begin()
        if self._own is None:
            if self._announce(_BATCH) == _END:
                raise StopIteration
            self._share_indices()
            return Awaited()
        batch = self._next(self._own)
        self._share_indices()
        if not self._feed.assigned and self._loader.first is None:
            self._loader.first = batch
        return batch

    def _share_indices(self) -> None:
        self._feed.share_indices(self._loader.loader, self._batches)
        self._batches += 1

    def _next(self, own: Iterator[Any]) -> Any:
        try:
            with self._feed.watch.limited("the loading of a batch"), self._feed.data.while_loading():
                batch = next(own)
        except StopIteration:
            self._announce(_END)
            raise
        except Exception:
            if self._feed.leads:
                self._announce(_FAILED)
            raise
        self._announce(_BATCH, checksum(batch) if self._feed.compares else 0)
        return batch

    def _announce(self, code: int, number: int = 0) -> int:
        return self._feed.announce(code, number, place=(self._number, self._batches))

    def follow_assignment(self) -> None:
        """Begin to load, or stop, as the plan says. A resumable loader begins later, when it has its state."""
        self._loader.first = None
        if not self._begun and not isinstance(self._loader, StatefulFedLoader):
            self._begin()
        if not self._feed.loads:
            self._own = None

    def _begin(self) -> None:
        """Open the loader, with the same random state on all ranks that load; on all ranks together."""
        self._begun = True
        if self._loader.peeked is None:
            self._feed.same_randomness()
        self._own = self._loader.open() if self._feed.loads else None
        self._loader.peeked = None


def _workers() -> list[int]:
    """List the processes that load for this one: children that must not outlive it."""
    children = multiprocessing.active_children()
    return [child.pid for child in children if child.daemon and child.pid is not None]


def checksum(batch: Any) -> int:
    """Return a number that other data would hardly have: of shapes and of a few values of every tensor."""
    total = 0
    for tensor in flatten(batch)[0]:
        total = zlib.crc32(str(tuple(tensor.shape)).encode(), total)
        if tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel():
            flat = tensor.detach().reshape(-1)
            few = flat[:: max(1, len(flat) // _MOST_VALUES)][:_MOST_VALUES].contiguous()
            total = zlib.crc32(few.view(torch.uint8).numpy().tobytes(), total)
    return total
