"""Gloo transport, for CPU ranks and for ranks that share a device (which NCCL refuses).

A transfer over gloo is only known to have ended by waiting for it, and a wait that times out breaks the connection. So
every directed channel has a thread that waits for its transfers, oldest first; the rank's own thread never waits inside
gloo, can be woken by its watch, and knows when a sent tensor may go. (Measured: the thread adds 0.08 ms per message.)
The tensors of a transfer are let go by the rank's own thread, the only one whose memory `runtime.memory` sees.

What is small travels together: an operation takes gloo longer than copying a few kilobytes does. Sends of little leave
by themselves, so their thread is not woken for each, but when somebody waits for one, or there are many.

Host tensors for a rank on the same host do not go through gloo (`same_host.py`), nor do sums within a host
(`host_sums.py`).

All channels share one process group: gloo tells messages apart by sender, receiver and tag, and keeps their order.
Tensors on a device are copied through pinned memory.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
import torch.distributed as dist

from lightning_pipe.core.program import Launches
from lightning_pipe.runtime.transport.collectives import Collectives, as_bytes, irecv, isend
from lightning_pipe.runtime.transport.host_sums import HostSums
from lightning_pipe.runtime.transport.protocol import Channel, Group
from lightning_pipe.runtime.transport.same_host import SameHost
from lightning_pipe.runtime.waiting import Done, Handle

SMALL_BYTES = 32 * 2**10  # of a tensor that is copied rather than sent by itself
_MOST_ASIDE = 64  # sends of little that nobody waits for: 2 MiB at most
_PARTING_S = 0.5  # a thread that waits for a message that never comes is left behind

Post: TypeAlias = Callable[[], list[dist.Work]]


class GlooTransport:
    """Carry tensors over gloo.

    Args:
        rank: this rank.
        ranks: number of ranks of the pipeline.
        timeout_s: after which torch gives up an operation by itself; longer than every deadline of ours.
    """

    launches: Launches = "on host"
    communicator_bytes = 0
    device: torch.device | None = None

    def __init__(self, *, rank: int, ranks: int, timeout_s: float) -> None:
        self.rank = rank
        self._collectives = Collectives("gloo", timeout_s=timeout_s)
        self._everyone = tuple(range(ranks))
        self._messages: dist.ProcessGroup | None = None
        self._lines: dict[Channel, _Line] = {}
        self._same_host = SameHost(rank)
        self._host_sums = HostSums(rank, self._same_host)
        weakref.finalize(self, _end, self._lines)  # before the interpreter ends, whoever forgets to close

    def open(self, *, channels: Sequence[Channel], groups: Sequence[Group]) -> None:
        """Create what is missing; on every rank with the same arguments."""
        is_first = self._messages is None
        if self._messages is None:
            self._messages = self._collectives.new_group(self._everyone)
        assert self._messages is not None, "every rank is a member"
        self._same_host.open(channels, world=self._messages)
        self._host_sums.open(groups, world=self._messages)
        for channel in channels:
            if self.rank in channel and channel not in self._lines:
                self._lines[channel] = _Line(channel)
        if self._collectives.open(groups) or is_first:
            dist.barrier(self._messages)  # a rank that fails now closes its groups: all must have connected to them

    def begin(self, *, is_first: bool) -> None:
        """Do nothing: nothing on a device waits for a message."""

    def send(self, tensors: Sequence[torch.Tensor], *, peer: int) -> Handle:
        """Post the sending of tensors, staged on the host if they are on a device."""
        full = [tensor for tensor in tensors if tensor.numel()]
        is_on_host = not any(tensor.is_cuda for tensor in full)
        if is_on_host and self._same_host.sends_to(peer):
            return self._same_host.send(full, peer=peer)
        line = self._lines[self.rank, peer]
        if is_on_host:
            small, large = _by_size(full)
            letters = [torch.cat([as_bytes(tensor) for tensor in small]), *large] if small else large
            works = self._isend(letters, peer)
            if sum(letter.untyped_storage().nbytes() for letter in letters) <= SMALL_BYTES:
                return _Transfer(line.wait_later(lambda: works), keep=tuple(letters))
            return _Transfer(line.wait_for(lambda: works), keep=tuple(letters))
        staged = [_pinned(tensor).copy_(tensor, non_blocking=True) for tensor in full]
        copied = torch.cuda.Event()
        copied.record()

        def post() -> list[dist.Work]:
            copied.synchronize()
            return self._isend(staged, peer)

        return _Transfer(line.wait_for(post), keep=tuple(full))

    def receive(self, buffers: Sequence[torch.Tensor], *, peer: int, owners: Sequence[torch.Tensor] = ()) -> Handle:
        """Post the receiving of tensors, through the host if the buffers are on a device."""
        full = [buffer for buffer in buffers if buffer.numel()]
        if self._same_host.hears_from(peer) and not any(buffer.is_cuda for buffer in full):
            return self._same_host.receive(full, peer=peer, owners=[owner for owner in owners if owner.numel()])
        small, large = _by_size(full)
        sizes = [buffer.nbytes for buffer in small]
        together = torch.empty(sum(sizes), dtype=torch.uint8)
        on_host = [_pinned(buffer) if buffer.is_cuda else buffer for buffer in large]
        copies = [(as_bytes(there), here) for there, here in zip(small, together.split(sizes), strict=True)]
        copies += [(there, here) for there, here in zip(large, on_host, strict=True) if there is not here]
        letters = [together, *on_host] if small else on_host
        works = [irecv(letter, peer=peer, group=self._group()) for letter in letters]
        return _Transfer(self._lines[peer, self.rank].wait_for(lambda: works), keep=tuple(letters), copies=copies)

    def all_reduce(self, tensor: torch.Tensor, *, group: Group) -> Handle:
        """Post a sum, in place."""
        if self._host_sums.sums(tensor, group):
            return self._host_sums.all_reduce(tensor, group=group)
        return self._collectives.all_reduce(tensor, group=group)

    def broadcast(self, tensor: torch.Tensor, *, source: int, group: Group) -> Handle:
        """Post the copying of the source's tensor into those of the other members."""
        if self._host_sums.broadcasts(tensor, group):
            return self._host_sums.broadcast(tensor, source=source, group=group)
        return self._collectives.broadcast(tensor, source=source, group=group)

    def reached(self) -> Handle:
        """Return what needs no waiting: the host has waited for whatever was waited for."""
        return Done()

    def trim(self) -> None:
        """Empty the slots of messages between processes of this host."""
        self._same_host.trim()

    def abort(self) -> None:
        """Do nothing: the rank's own thread never waits inside gloo."""

    def close(self) -> None:
        """End the threads and destroy the groups."""
        _end(self._lines)
        self._host_sums.close()
        self._same_host.close()
        self._collectives.close()
        if self._messages is not None:
            dist.destroy_process_group(self._messages)
            self._messages = None

    def _isend(self, tensors: Sequence[torch.Tensor], peer: int) -> list[dist.Work]:
        return [isend(tensor, peer=peer, group=self._group()) for tensor in tensors]

    def _group(self) -> dist.ProcessGroup:
        assert self._messages is not None, "a channel was found, so open has made the group"
        return self._messages


class _Ending:
    """The end of operations that a thread waits for.

    Args:
        wake: hands them to the thread, if that has not been done.
    """

    __slots__ = ("_error", "_lock", "_wake", "is_over")

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._wake, self._lock = wake, threading.Lock()
        self._lock.acquire()
        self._error: Exception | None = None
        self.is_over = False

    def tell(self, error: Exception | None = None) -> None:
        """Let whoever waits know that all has ended, or what went wrong."""
        self._error, self.is_over, self._wake = error, True, None
        self._lock.release()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long; return whether all has ended.

        Raises:
            RuntimeError: what went wrong.
        """
        if not self.is_over:
            if (wake := self._wake) is not None:
                wake()
            if not self._lock.acquire(timeout=max(0.0, timeout_s)):
                return False
            self._lock.release()
        if self._error is not None:
            raise self._error
        return True

    @property
    def is_well(self) -> bool:
        """Return whether all has ended, without an error."""
        return self.is_over and self._error is None


class _Line:
    """The thread of one channel: post and wait for one transfer after another."""

    def __init__(self, channel: Channel) -> None:
        self._jobs: queue.SimpleQueue[list[tuple[Post, _Ending]] | None] = queue.SimpleQueue()
        self._aside: list[tuple[Post, _Ending]] = []  # by the rank's own thread
        sender, receiver = channel
        self._thread = threading.Thread(target=self._run, name=f"pipe {sender}>{receiver}", daemon=True)

    def wait_for(self, post: Post) -> _Ending:
        """Return the end of all operations that `post` returns."""
        ending = _Ending()
        self._aside.append((post, ending))
        self._wake()
        return ending

    def wait_later(self, post: Post) -> _Ending:
        """Return the end of operations that need nobody to wait for them; it is looked for when it is asked for."""
        ending = _Ending(self._wake)
        self._aside.append((post, ending))
        if len(self._aside) >= _MOST_ASIDE:
            self._wake()
        return ending

    def _wake(self) -> None:
        """Hand the thread what is left for it."""
        if self._aside:
            jobs, self._aside = self._aside, []
            self._jobs.put(jobs)
            if self._thread.ident is None:  # most lines of one host are never used
                self._thread.start()

    def end(self) -> None:
        """Let the thread end once it has nothing left to wait for."""
        self._wake()
        self._jobs.put(None)

    def join(self) -> None:
        """Wait a moment for the thread: one that is still inside torch when the interpreter ends aborts the process."""
        if self._thread.ident is not None:
            self._thread.join(_PARTING_S)

    def _run(self) -> None:
        while (jobs := self._jobs.get()) is not None:
            for post, ending in jobs:
                try:
                    _finish(post())
                except Exception as error:
                    ending.tell(error)
                else:
                    ending.tell()
            jobs.clear()
            del jobs, post, ending


def _by_size(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that travel together, two of the host at least, and those that travel by themselves."""
    small = [tensor for tensor in tensors if tensor.nbytes <= SMALL_BYTES and not tensor.is_cuda]
    if len(small) < 2:
        return [], tensors
    return small, [tensor for tensor in tensors if tensor.nbytes > SMALL_BYTES or tensor.is_cuda]


def _finish(works: list[dist.Work]) -> None:
    """Wait for operations and forget them, and with them their tensors, before anybody is told."""
    for work in works:
        work.wait()  # up to the time-out of the group; our deadlines are shorter
    works.clear()


def _end(lines: dict[Channel, _Line]) -> None:
    """End the threads of all channels and forget them."""
    for line in lines.values():
        line.end()
    for line in lines.values():
        line.join()
    lines.clear()


@dataclass
class _Transfer:
    """A message under way; `keep` is what it moves, `copies` (device, host) are made when it has arrived."""

    ending: _Ending
    keep: tuple[torch.Tensor, ...] = ()
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def wait(self, timeout_s: float) -> bool:
        if not self.ending.wait(timeout_s):
            return False
        for there, here in self.copies:
            there.copy_(here, non_blocking=True)  # queued on the current stream
        self.copies.clear()
        return True

    def landed(self) -> bool:
        return self.ending.is_well  # a failure is raised by `wait`


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
