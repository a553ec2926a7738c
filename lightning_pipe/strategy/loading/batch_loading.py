"""Batch loading: which rank loads which batch, and how the other ranks learn of it.

Ranks of the first stage load, each the whole batch in the order of a single device; the other ranks follow: they load
nothing and get stand-ins. Until there is a plan every rank loads for itself.

    Feed.wrap(loader)     every loader of the trainer; an iteration begins and ends on all ranks together
    Feed.assign(ranks)    the plan is known: these ranks load from now on
    Feed.begin_early()    training begins: loaders that were iterated before it are opened, as on one device
    Feed.share(batch)     after the user's transfer hooks: tell the structure; followers get a batch of stand-ins

Per batch a small message goes from the first loading rank to all others: that there is one, with the number of its
structure if that is known already; if not, a second one with the structure. It does not wait until they have arrived
where ranks run ahead or are few. A rank that loads for itself compares the message with its own batch later, before
anything of other ranks enters its step (`confirm`).

Loading draws random numbers; followers go on with the state of the generators that it leaves (`SharedRandomness`).
"""

from __future__ import annotations

import copy
import functools
import itertools
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from lightning_pipe.capture.python.users_code import is_lightnings
from lightning_pipe.capture.steps.batch import Structure, flatten
from lightning_pipe.capture.steps.keyed_random import Randomness
from lightning_pipe.capture.torch_private import without_overrides
from lightning_pipe.errors import BatchError, PipelineError
from lightning_pipe.lightning_names import pl_worker_init_function
from lightning_pipe.runtime.guard.guarded_watch import GuardedWatch
from lightning_pipe.runtime.guard.watch import MismatchError, Unwatched
from lightning_pipe.runtime.shortages import shortages_named
from lightning_pipe.strategy.loading.announcement import BATCH, END, FAILED, Announcement, checksum
from lightning_pipe.strategy.loading.known_structures import UNKNOWN, KnownStructures, packed
from lightning_pipe.strategy.loading.samplers import gather_shards
from lightning_pipe.strategy.loading.shared_randomness import SharedRandomness
from lightning_pipe.strategy.loading.world_size import WholeData
from lightning_pipe.strategy.parameters.stand_ins import absent_batch
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

T = TypeVar("T")
_HOST = torch.device("cpu")
_FEW_RANKS = 8  # to which the first tells what it has in less time than it takes to pass it on


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
        connected: gives control to the other ranks, after the fit too; None where there is none.

    Attributes:
        data: answers code of loaders that asks for its rank.
        tells_indices: whether all ranks are told which samples a batch has, for writers of predictions.
        structures: that were met.
        told: number of the structure of the batch that was announced last.
        random: gives ranks that load nothing the random numbers of those that load.
        catch_up: hears of batches of which this rank need not have heard yet.
        state_before: returns the state that a loader had before batches were loaded early, if any were.
    """

    def __init__(
        self,
        control: ControlPlane,
        *,
        ahead: bool = False,
        device: torch.device = _HOST,
        watch: GuardedWatch | Unwatched | None = None,
        connected: Callable[[], AbstractContextManager[ControlPlane | None]] = nullcontext,
    ) -> None:
        self._control, self._device, self._connected = control, device, connected
        self.watch = watch or Unwatched()
        self.data = WholeData(ranks=control.ranks)
        self._goes_on = ahead or control.ranks <= _FEW_RANKS
        self._tell = control.tell if self._goes_on else control.copy
        self._loading = tuple(range(control.ranks))
        self.random = SharedRandomness(control, device)
        self._assigned = False
        self._early: list[FedIterator] = []
        self._holds_back = False
        self.tells_indices = False
        self.catch_up: Callable[[], None] = lambda: None
        self.state_before: Callable[[StatefulFedLoader], dict[str, Any] | Exception | None] = lambda loader: None
        self.structures = KnownStructures()
        self.told = UNKNOWN
        self._unconfirmed: Callable[[], None] | None = None
        self._iterations = 0

    @property
    def loading(self) -> tuple[int, ...]:
        """Return the ranks that load batches."""
        return self._loading

    @property
    def loads(self) -> bool:
        """Return whether this rank loads batches."""
        return self._control.rank in self._loading

    @property
    def assigned(self) -> bool:
        """Return whether it is decided who loads."""
        return self._assigned

    @property
    def rank(self) -> int:
        """Return this rank."""
        return self._control.rank

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

    def described(self, batch: Any) -> tuple[int, Hashable | None]:
        """Return a checksum of a batch that was just loaded, and what tells its structure; 0, None if nobody asks."""
        if not (self.compares or self.structures.is_plain):
            return 0, None
        with without_overrides():  # a mode that watches hooks would be asked for every shape
            tensors, structure = flatten(batch)
            number = checksum(tensors) if self.compares else 0
            return number, structure.form if self.structures.is_plain else None

    def wrap(self, loader: Any) -> FedLoader:
        """Return a loader that is iterated on all ranks together."""
        if isinstance(loader, FedLoader):
            return loader if loader.feed is self else self.wrap(loader.loader)  # of a fit before, in a CombinedLoader
        gather_shards(loader)
        if getattr(loader, "worker_init_fn", False) is None and int(os.environ.get("PL_SEED_WORKERS", "0")):
            # Lightning would seed workers by rank; ranks that load must load the same, namely what rank 0 would
            loader.worker_init_fn = functools.partial(pl_worker_init_function, rank=0)
        return StatefulFedLoader(loader, self) if isinstance(loader, _Stateful) else FedLoader(loader, self)

    def assign(self, ranks: tuple[int, ...]) -> None:
        """Decide which ranks load, on all ranks together; iterations that have begun go on there and end elsewhere."""
        self._loading, self._assigned = ranks, True
        self.random.loading = ranks
        if self._goes_on:
            with self.watch.opening("the connections of the rank that tells of batches"):
                self._control.expect(self.source)
        for iterator in self._early:
            iterator.follow_assignment()
        self._early = [iterator for iterator in self._early if not iterator.has_begun]

    def hold_back(self) -> None:
        """Let loaders be opened by `begin_early`, and not when Lightning iterates them before training."""
        self._holds_back = True

    def begin_early(self) -> None:
        """Open what Lightning has iterated before training, to look at its first batch; on all ranks together."""
        self._holds_back = False
        for iterator in self._early:
            iterator.begin()
        if self._assigned:
            self._early.clear()

    def forget_early(self) -> None:
        """Forget what Lightning has iterated before training, as it will ask for other loaders."""
        self._early.clear()

    def state_of(self, loader: StatefulFedLoader) -> dict[str, Any]:
        """Return the state of a loader on the first loading rank, after the fit too.

        Raises:
            PipelineError: if the fit has failed, and this rank does not load.
        """
        with self._connected() as control:
            if control is not None:
                return control.agreed(loader.own_state, source=self.source, what="the state of a loader")
        if not self.loads:
            raise PipelineError(f"The state of a loader is on rank {self.source}, to which there is no connection.")
        return loader.own_state()

    @property
    def why_not_behind(self) -> str:
        """Return why other ranks have to hear of a batch when it is loaded; "" if they may hear of it later.

        Rank 0 tells of it then: to rank 0 others send more than batches, which would be taken for these.
        """
        if self.random.are_drawn:
            return "loading, or hooks that move batches, draw random numbers"
        if self.tells_indices:
            return "a prediction writer asks for the indices of samples"
        return "" if self._goes_on and self.source == 0 else "batches are not loaded on rank 0, or go to many ranks"

    def out_of_turn(self) -> AbstractContextManager[None]:
        """Tell, or hear, of a batch of which other ranks hear, or have told, at another place of what they exchange."""
        return self._control.uncounted()

    def broadcast(self, value: T, *, what: str) -> T:
        """Return the value of the first loading rank on every rank, which does not wait where it goes on."""
        send = self._control.tell_object if self._goes_on else self._control.broadcast
        return send(value, source=self.source, what=what)

    def iterate(self, loader: FedLoader) -> FedIterator:
        """Begin an iteration."""
        self.catch_up()
        iterator = FedIterator(loader, self, number=self._iterations)
        self._iterations += 1
        if not self._assigned:
            self._early.append(iterator)
        if self._assigned or not self._holds_back:
            iterator.begin()
        return iterator

    def announce(
        self,
        code: int,
        checksum: int = 0,
        *,
        place: tuple[int, int],
        structure: int = UNKNOWN,
        drawn: Randomness | None = None,
    ) -> int:
        """Tell, or hear, whether there is another batch, and compare it with the first loading rank's, maybe later.

        Args:
            code: what there is here.
            checksum: of the batch.
            place: numbers of the iteration and of the batch in it.
            structure: number of the batch's structure, if it is known.
            drawn: state of the generators, if loading has changed it and other ranks follow.
        """
        if self._control.ranks == 1:
            return code
        self.confirm()
        packed = b"" if drawn is None else pickle.dumps(drawn)
        mine = Announcement(code, checksum, *place, structure, len(packed))
        self.told = structure
        can_wait = self.structures.was_last(structure) and not packed
        if self.loads and not self.leads and self._goes_on and can_wait:
            heard = torch.tensor(mine.values)
            wait = self._control.hear(heard, source=self.source, what="the next batch")

            def compare() -> None:
                self._control.wait(wait)
                self._compare(mine, Announcement(*heard.tolist()))

            self._unconfirmed = compare
            return code
        told = self._tell(torch.tensor(mine.values), source=self.source, what="the next batch")
        theirs = Announcement(*told.tolist())
        self._compare(mine, theirs)
        if theirs.random_bytes:
            self.random.are_drawn |= place[1] > 0  # an iteration that shuffles draws with its first batch alone
            content = torch.frombuffer(bytearray(packed if self.leads else theirs.random_bytes), dtype=torch.uint8)
            told = self._tell(content, source=self.source, what="the random numbers of loading")
            self.random.follow(pickle.loads(told.numpy().tobytes()))
        self.told = theirs.structure
        return theirs.code

    def confirm(self) -> None:
        """Compare the batch of this rank with that of the first loading rank, if that has not been done yet.

        Raises:
            BatchError: if it is another one.
        """
        compare, self._unconfirmed = self._unconfirmed, None
        if compare is not None:
            compare()

    def _compare(self, mine: Announcement, theirs: Announcement) -> None:
        rank, source = self._control.rank, self.source
        if (theirs.iteration, theirs.batch) != (mine.iteration, mine.batch):
            raise MismatchError.of(
                f"rank {rank} for batch {mine.batch} of loader {mine.iteration}, rank {source} for batch "
                f"{theirs.batch} of loader {theirs.iteration} (in the order in which loaders were begun)"
            )
        if theirs.code == FAILED and mine.code != FAILED:
            self.watch.hear()
            raise PipelineError(f"Rank {source} failed to load a batch; its own error says why.")
        is_same = theirs == mine and bool(theirs.random_bytes) == bool(mine.random_bytes)
        if self.loads and mine.code != FAILED and not is_same:
            found = "other data" if theirs.code == mine.code else "another number of batches"
            raise BatchError(
                f"Rank {rank} loaded {found} than rank {source}; the replicas of the first stage "
                "need the same batches. Call seed_everything(seed, workers=True), draw random numbers of the data set "
                "from torch's, NumPy's or Python's generator, or give the first stage one rank."
            )

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

    def share(self, batch: Any, *, loaded: Any = None) -> tuple[Any, Structure]:
        """Return the batch and its structure; on ranks that do not load, a batch of stand-ins.

        Args:
            batch: as it is on the device, where this rank loads.
            loaded: the batch as it was loaded, or what stood for it; None if it was shared before.
        """
        if self._control.ranks == 1:
            return batch, flatten(batch)[1]
        structure = flatten(batch)[1] if self.loads else None
        form, number = self.structures.told_of(loaded)
        is_known = form is not None and number != UNKNOWN
        if number == UNKNOWN:
            number = self._tell_structure(structure)
        elif structure is not None and structure.leaves != self.structures[number].leaves:
            raise BatchError(
                f"The tensors of a batch have come to the device as {structure.leaves}; a batch that was loaded alike "
                f"came as {self.structures[number].leaves}. A batch's own `to` must not change shapes or types; do "
                "that in on_after_batch_transfer."
            )
        self.structures.came(form, number)
        known = self.structures[number]
        if structure is not None:
            return batch, known if is_known else structure
        return absent_batch(known, ranks=self._loading, rank=self._control.rank, device=self._device), known

    def _tell_structure(self, structure: Structure | None) -> int:
        """Tell, or hear, the number of a structure; and the structure if it was not met before."""
        content = packed(structure) if structure is not None and self.leads else b""
        mine, what = torch.tensor([self.structures.number_of(content)]), "the structure of a batch"
        number = int(self._tell(mine, source=self.source, what=what))
        if number == UNKNOWN:
            number = self.structures.learn(self.broadcast(content, what=what))
        return number


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

    __class__ = property(lambda self: type(self.loader))  # a callback may ask whether it is a DataLoader

    def __init__(self, loader: Any, feed: Feed) -> None:
        vars(self).update(loader=loader, feed=feed, first=None, peeked=None)

    def __iter__(self) -> Iterator[Any]:
        """Iterate on all ranks together; for who is not Lightning (a hook), by this rank for itself."""
        return self.feed.iterate(self) if is_lightnings(sys._getframe(1).f_code.co_filename) else self._by_itself()

    def _by_itself(self) -> Iterator[Any]:
        with self.feed.data.while_loading():
            batches = iter(self.loader)
        while True:
            with self.feed.data.while_loading():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def __len__(self) -> int:
        with self.feed.data.while_loading():
            return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN or (name.startswith("__") and not name.startswith("__pl_")):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            vars(self)[name] = value
        else:
            setattr(self.loader, name, value)

    def open(self) -> Iterator[Any]:
        """Return an iterator of the wrapped loader: the one whose first batch was looked at, or a new one."""
        peeked, self.peeked = self.peeked, None
        return self._iterator() if peeked is None else peeked

    def _iterator(self) -> Iterator[Any]:
        with self.feed.data.while_loading(), shortages_named(f"A loader of rank {self.feed.rank}"):
            opened: Iterator[Any] = iter(self.loader)
        self.feed.watch.watch_processes(_workers())
        return opened

    def look(self) -> Any:
        """Return the first batch of the iteration that comes next, or has begun; on all ranks together.

        Raises:
            StopIteration: if there is none.
        """
        if self.first is None:
            self.feed.random.share()
            iterator = self._iterator()
            with self.feed.data.while_loading():
                self._note_state()
                self.peeked = iter(())  # where it gives nothing, as its state is used up
                self.first = next(iterator)
            self.peeked = itertools.chain([self.first], _following(iterator))
        return self.first

    def _note_state(self) -> None:
        """Note the state before the first batch, of a loader that has one."""


def _following(batches: Iterator[Any]) -> Iterator[Any]:
    """Iterate without asking for the iterator of an iterator: a loader that is its own begins again there."""
    with suppress(StopIteration):
        while True:
            yield next(batches)


class StatefulFedLoader(FedLoader):
    """A loader that can be resumed in the middle of an epoch.

    Attributes:
        unlooked: its state before its first batch was looked at, or why it had none; until that batch is given.
    """

    _OWN = FedLoader._OWN | {"unlooked"}
    unlooked: dict[str, Any] | Exception | None

    def __init__(self, loader: Any, feed: Feed) -> None:
        super().__init__(loader, feed)
        vars(self).update(unlooked=None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader that gives the batches."""
        return self.feed.state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state of this rank's loader."""
        self.loader.load_state_dict(state)

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank's loader, as if nobody had looked at its batches before their turn."""
        early = self.feed.state_before(self)
        state: dict[str, Any] | Exception | None = self.unlooked if early is None else early
        if isinstance(state, Exception):
            raise state
        return self.loader.state_dict() if state is None else state

    def noted_state(self) -> dict[str, Any] | Exception:
        """Return a copy of the present state, or why there is none."""
        if self.unlooked is None:
            try:
                return copy.deepcopy(self.loader.state_dict())  # type: ignore[no-any-return]
            except Exception as error:  # that who saves then has on one device, too
                return error
        return self.unlooked

    def open(self) -> Iterator[Any]:
        """Return an iterator as other loaders do; its first batch ends what a look has noted."""
        return self._given(super().open())

    def _given(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in _following(batches):
            self.unlooked = None
            yield batch
        self.unlooked = None

    def _note_state(self) -> None:
        self.unlooked = self.noted_state()


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
            if self._announce(BATCH) == END:
                raise StopIteration
            self._share_indices()
            awaited = Awaited()
            self._feed.structures.loaded(awaited, None, self._feed.told)
            return awaited
        batch = self._next(self._own)
        self._share_indices()
        if not self._feed.assigned and self._loader.first is None:
            self._loader.first = batch
        return batch

    def _share_indices(self) -> None:
        self._feed.share_indices(self._loader.loader, self._batches)
        self._batches += 1

    def _next(self, own: Iterator[Any]) -> Any:
        before = self._feed.random.now()
        try:
            with self._feed.watch.limited("the loading of a batch"), self._feed.data.while_loading():
                batch = next(own)
        except StopIteration:
            self._announce(END, drawn=self._feed.random.since(before))
            raise
        except Exception:
            self._announce(FAILED)
            raise
        number, form = self._feed.described(batch)
        structures = self._feed.structures
        self._announce(BATCH, number, structures.expected(form), self._feed.random.since(before))
        structures.loaded(batch, form, self._feed.told)
        return batch

    def _announce(self, code: int, number: int = 0, structure: int = UNKNOWN, drawn: Randomness | None = None) -> int:
        return self._feed.announce(code, number, place=(self._number, self._batches), structure=structure, drawn=drawn)

    def begin(self) -> None:
        """Open the loader, if that has not been done."""
        if not self._begun:
            self._begin()

    @property
    def has_begun(self) -> bool:
        """Return whether the loader was opened."""
        return self._begun

    def follow_assignment(self) -> None:
        """Stop to load where the plan says so."""
        self._loader.first = None
        if not self._feed.loads:
            self._own = None

    def _begin(self) -> None:
        """Open the loader, with the same random state on all ranks, before and after; on all ranks together."""
        self._begun = True
        if self._loader.peeked is None:
            self._feed.random.share()
        before = self._feed.random.now()
        self._own = self._loader.open() if self._feed.loads else None
        self._loader.peeked = None
        self._feed.random.tell_since(before)


def _workers() -> list[int]:
    """List the processes that load for this one: children that must not outlive it."""
    children = multiprocessing.active_children()
    return [child.pid for child in children if child.daemon and child.pid is not None]
