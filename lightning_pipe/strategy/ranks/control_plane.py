"""Control plane: small things that ranks send each other, such as a structure, a plan, a checkpoint's parameter.

Over the host, apart from the messages of programs. Every wait goes through the watch, so a rank that never comes is an
error with words instead of a hang. A single rank talks to itself.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from lightning_pipe.errors import BrokenRouteError, PipelineError, faults_reported
from lightning_pipe.runtime.guard.failure import PAIR, TOGETHER
from lightning_pipe.runtime.guard.watch import MismatchError
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.runtime.waiting import Done, Handle, Wait
from lightning_pipe.strategy.ranks.shown_errors import raised_on

T = TypeVar("T")

_FEW = 16  # numbers of a sum: one more, by which ranks see that they add the same, costs nothing
_MARKS = 2**20


class ControlPlane:
    """Exchange objects and host tensors between all ranks; every method is called on all of them together.

    Args:
        transport: carries host tensors; None with a single rank.
        rank: this rank.
        ranks: number of ranks.
        wait: waits for a handle, with a deadline.
        begun: told the number of every exchange that begins.

    Attributes:
        rank, ranks, wait: as given.
    """

    def __init__(
        self,
        transport: Transport | None,
        *,
        rank: int,
        ranks: int,
        wait: Callable[[Wait], None],
        begun: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._transport = transport
        self.wait, self._begun, self._exchanges = wait, begun, 0
        self._counts = True
        self._everyone = tuple(range(ranks))
        self._leaving: list[Handle] = []
        self._told_by: set[int] = set()  # ranks with channels to all others
        if transport is not None:
            transport.open(channels=[(r, 0) for r in range(1, ranks)], groups=[self._everyone])
        self.expect(0)

    @property
    def transport(self) -> Transport | None:
        """Return what carries host tensors, with a group of all ranks; None with a single rank."""
        return self._transport

    def broadcast(self, value: T, *, source: int, what: str) -> T:
        """Return the value of rank `source` on every rank."""
        if self.ranks == 1:
            return value
        packed = _pack(value) if self.rank == source else b""
        size = self.sum(torch.tensor([len(packed)]), what=what, key=f"{what} of {source}")
        content = torch.frombuffer(bytearray(packed), dtype=torch.uint8) if packed else torch.empty(0)
        if self.rank != source:
            content = torch.empty(int(size), dtype=torch.uint8)
        content = self.copy(content, source=source, what=what)
        return value if self.rank == source else _unpack(content)

    def agreed(self, make: Callable[[], T], *, source: int, what: str) -> T:
        """Make a value on one rank and return it on every rank; an error there is raised on every rank."""
        made: tuple[Any, Exception | None] = (None, None)
        if self.rank == source:
            try:
                made = (make(), None)
            except Exception as error:
                made = (None, error)
        value: T
        value, failure = self.broadcast(made, source=source, what=what)
        if failure is not None:
            raise failure if self.rank == source else raised_on(failure, source)
        return value

    def made(self, make: Callable[[], T], *, what: str) -> T:
        """Make something on every rank for itself.

        Raises:
            BrokenRouteError: on every rank, if that fails on some rank for a fault of this package.
        """
        fault: BrokenRouteError | None = None
        try:
            with faults_reported(what):
                value = make()
        except BrokenRouteError as error:
            fault = error
        faults = self.sum(torch.tensor(float(fault is not None)), what=what)
        if fault is not None:
            raise fault
        if faults:
            raise BrokenRouteError(f"{what} cannot be made on another rank")
        return value

    def copy(self, tensor: torch.Tensor, *, source: int, what: str) -> torch.Tensor:
        """Copy a contiguous host tensor of one rank into those of the others, in place, and return it."""
        if self._transport is not None and tensor.numel():
            number = self._begin()
            handle = self._transport.broadcast(tensor, source=source, group=self._everyone)
            self.wait(Wait(handle, what, TOGETHER, number))
        return tensor

    def expect(self, source: int) -> None:
        """Prepare that rank `source` tells the others something; all ranks come here before it does."""
        if self._transport is not None and source not in self._told_by:
            self._transport.open(channels=[(source, rank) for rank in self._everyone if rank != source], groups=[])
            self._told_by.add(source)

    def tell(self, tensor: torch.Tensor, *, source: int, what: str) -> torch.Tensor:
        """Do as `copy` does, but let the source go on at once, and every other rank as soon as it has its copy.

        A broadcast would not: ranks pass it on to each other, so the first waits for the last; it is fewer messages.
        """
        self.wait(self.hear(tensor, source=source, what=what))
        return tensor

    def tell_object(self, value: T, *, source: int, what: str) -> T:
        """Return the value of rank `source` on every rank; it goes on at once, as with `tell`."""
        packed = _pack(value) if self.rank == source else b""
        size = self.tell(torch.tensor([len(packed)]), source=source, what=what)
        content = torch.frombuffer(bytearray(packed), dtype=torch.uint8) if packed else torch.empty(0)
        if self.rank != source:
            content = torch.empty(int(size), dtype=torch.uint8)
        self.tell(content, source=source, what=what)
        return value if self.rank == source else _unpack(content)

    def hear(self, tensor: torch.Tensor, *, source: int, what: str) -> Wait:
        """Begin to do as `tell` does; a rank that waits has its copy."""
        if self._transport is None:
            return Wait(Done(), what)
        number = self._begin()
        assert source in self._told_by, "connections are made by all ranks together, so not now"
        others = [rank for rank in self._everyone if rank != source]
        if self.rank == source:
            self._let_go([self._transport.send([tensor], peer=rank) for rank in others])
            return Wait(Done(), what)
        return Wait(self._transport.receive([tensor], peer=source), what, PAIR, number, source)

    def sum(self, tensor: torch.Tensor, *, what: str, key: str = "") -> torch.Tensor:
        """Add the host tensors of all ranks, in place, and return the sum.

        Args:
            tensor: what this rank adds.
            what: for errors.
            key: the same on all ranks that come to the same thing; `what` by default.

        Raises:
            MismatchError: if few numbers are added, and some rank adds others.
        """
        if self._transport is None or tensor.numel() > _FEW:
            self.wait(self.begin_sum(tensor, what=what))
            return tensor
        mark = zlib.crc32((key or what).encode()) % _MARKS + 1
        marked = torch.cat([tensor.reshape(-1).to(torch.float64), torch.tensor([float(mark)], dtype=torch.float64)])
        self.wait(self.begin_sum(marked, what=what))
        if marked[-1] != mark * self.ranks:
            raise MismatchError.of(f"rank {self.rank} for {what}, some rank for something else")
        return tensor.copy_(marked[:-1].reshape(tensor.shape))

    def begin_sum(self, tensor: torch.Tensor, *, what: str, over: Transport | None = None) -> Wait:
        """Begin to add the host tensors of all ranks, in place; who waits has the sum.

        Args:
            tensor: what this rank adds.
            what: for errors.
            over: adds tensors of a device instead; it has a group of all ranks.
        """
        if self._transport is None:
            return Wait(Done(), what)
        number = self._begin()
        handle = (over or self._transport).all_reduce(tensor, group=self._everyone)
        return Wait(handle, what, TOGETHER, number)

    def to_first(self, value: T | None, *, source: int, what: str) -> T | None:
        """Bring an object of rank `source` to rank 0; the other ranks are not concerned and get None."""
        if source == 0:
            return value if self.rank == 0 else None
        if self.rank == source:
            self._send(_pack(value), what)
        return self._receive(source, what) if self.rank == 0 else None

    def begin_gather(self, tensor: torch.Tensor, *, sizes: Sequence[int], what: str) -> list[tuple[torch.Tensor, Wait]]:
        """Begin to bring a flat host tensor of every rank to rank 0; the other ranks go on at once.

        Args:
            tensor: that of this rank.
            sizes: elements of the tensor of every rank.
            what: for errors.

        Returns:
            On rank 0 the tensors by rank, which are there when it has waited; elsewhere nothing.
        """
        if self._transport is None:
            return [(tensor, Wait(Done(), what))]
        transport, number = self._transport, self._begin()
        if self.rank:
            self._let_go([transport.send([tensor], peer=0)])
            return []
        gathered = [(tensor, Wait(Done(), what))]
        for source in self._everyone[1:]:
            there = torch.empty(sizes[source], dtype=tensor.dtype)
            gathered.append((there, Wait(transport.receive([there], peer=source), what, PAIR, number, source)))
        return gathered

    def close(self) -> None:
        """Release the transport. On all ranks, with nothing under way."""
        if self._transport is not None:
            self._transport.close()

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Give exchanges no number, as other ranks begin them at another place of their order.

        Ranks at the same place have begun as many exchanges; the guard compares these numbers.
        """
        counts, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = counts

    def _begin(self) -> int:
        """Return the number of an exchange that all ranks begin, from one on; others can see how far this rank is."""
        if not self._counts:
            return 0
        self._exchanges += 1
        self._begun(self._exchanges)
        return self._exchanges

    def _let_go(self, sent: list[Handle]) -> None:
        """Keep messages until they have left, without waiting for that."""
        self._leaving = [handle for handle in self._leaving if not handle.landed()] + sent

    def _send(self, packed: bytes, what: str) -> None:
        assert self._transport is not None, "only one of several ranks sends"
        size, content = torch.tensor([len(packed)]), torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        for tensor in (size, content):
            self._finish(self._transport.send([tensor], peer=0), what, peer=0)

    def _receive(self, source: int, what: str) -> Any:
        assert self._transport is not None, "only one of several ranks receives"
        size = torch.empty(1, dtype=torch.int64)
        self._finish(self._transport.receive([size], peer=source), what, peer=source)
        content = torch.empty(int(size), dtype=torch.uint8)
        self._finish(self._transport.receive([content], peer=source), what, peer=source)
        return _unpack(content)

    def _finish(self, handle: Handle, what: str, *, peer: int) -> None:
        self.wait(Wait(handle, what, PAIR, peer=peer))


def _pack(value: Any) -> bytes:
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise PipelineError(
            f"{type(value).__name__} cannot be sent to other ranks: {error}. Everything in a batch, and every error "
            "raised while one is loaded, must be picklable."
        ) from error


def _unpack(content: torch.Tensor) -> Any:
    return pickle.loads(content.numpy().tobytes())
