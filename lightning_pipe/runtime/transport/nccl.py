"""NCCL transport: every directed channel has a communicator of its own, and receives are launched late.

Operations on one communicator are executed one after another, so a channel that were shared by both directions could
make a send wait for a receive that waits for it. A communicator that is made lazily is made in the midst of a program,
where it waits for a peer that waits for what this rank has not launched. So `open` makes all of them, in one order on
all ranks, and each carries something before it returns. Disjoint pairs do that at the same time.

A launched receive occupies the device until its message comes. `device_works` says when it is launched.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median_high
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_pipe.core.program import Launches
from lightning_pipe.core.sharding import PIECE_BYTES
from lightning_pipe.runtime.transport.collectives import Collectives, irecv, isend
from lightning_pipe.runtime.transport.device_works import (
    AbortFlag,
    LateReceive,
    ReceiveQueue,
    StreamReached,
    StreamWork,
)
from lightning_pipe.runtime.transport.protocol import Channel, Group
from lightning_pipe.runtime.waiting import Handle

T = TypeVar("T", bound=tuple[int, ...])
log = logging.getLogger(__name__)

_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read by torch when it makes a group


class NcclTransport:
    """Carry tensors over NCCL.

    Args:
        rank: this rank.
        device: its device.
        timeout_s: after which torch gives up an operation by itself; longer than every deadline of ours.
    """

    launches: Launches = "late"

    def __init__(self, *, rank: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self.device = device
        self._aborted = AbortFlag()
        self._collectives = Collectives("nccl", timeout_s=timeout_s, aborted=self._aborted)
        self._pairs: dict[Channel, dist.ProcessGroup | None] = {}  # None: this rank is at neither end
        self._receives: dict[int, ReceiveQueue] = {}  # by sender
        self._stream: torch.cuda.Stream | None = None  # which launches receives
        self._sizes: list[int] = []  # bytes that each communicator has taken

    @property
    def communicator_bytes(self) -> int:
        """Return the bytes of the device that a communicator of this rank takes; 0 before one was made."""
        return median_high(self._sizes) if self._sizes else 0

    def open(self, *, channels: Sequence[Channel], groups: Sequence[Group]) -> None:
        """Make what is missing, and let each communicator carry something; on every rank with the same arguments.

        Raises:
            RuntimeError: if the communicators are aborted meanwhile.
        """
        channels = [channel for channel in channels if channel not in self._pairs]
        with _errors_left_to_us():
            for channel in channels:
                self._aborted.check()
                self._pairs[channel] = self._collectives.new_group(channel)
            groups = self._collectives.open(groups)
        for channel in in_rounds(channels):
            if self.rank in channel:
                self._measured(partial(self._greet, channel))
        for group in in_rounds(groups):
            if self.rank in group:
                self._measured(partial(self._greet_group, group))

    def begin(self, *, is_first: bool) -> None:
        """Do nothing: whatever a program needs is open."""

    def send(self, tensors: Sequence[torch.Tensor], *, peer: int) -> Handle:
        """Post the sending of tensors."""
        self._aborted.check()
        full = tuple(tensor for tensor in tensors if tensor.numel())
        group = self._of((self.rank, peer))
        return StreamWork([isend(tensor, peer=peer, group=group) for tensor in full], full, self._aborted)

    def receive(
        self, buffers: Sequence[torch.Tensor], *, peer: int, owners: Sequence[torch.Tensor] = ()
    ) -> LateReceive:
        """Announce a receive, which is launched when it is waited for."""
        self._aborted.check()
        if peer not in self._receives:
            launch = partial(irecv, peer=peer, group=self._of((peer, self.rank)))
            self._receives[peer] = ReceiveQueue(launch, beside=self._beside(), aborted=self._aborted)
        return self._receives[peer].announce([buffer for buffer in buffers if buffer.numel()])

    def all_reduce(self, tensor: torch.Tensor, *, group: Group) -> Handle:
        """Post a sum, in place."""
        return self._collectives.all_reduce(tensor, group=group)

    def broadcast(self, tensor: torch.Tensor, *, source: int, group: Group) -> Handle:
        """Post the copying of the source's tensor into those of the other members."""
        return self._collectives.broadcast(tensor, source=source, group=group)

    def reached(self) -> Handle:
        """Return the handle of all that the device was told until now."""
        return StreamReached(self.device, self._aborted)

    def trim(self) -> None:
        """Destroy all communicators; `open` makes those again that a program uses."""
        for pair in self._own_pairs():
            dist.destroy_process_group(pair)
        self._pairs.clear()
        self._receives.clear()
        self._collectives.close()

    def abort(self) -> None:
        """Abort all communicators of this rank, so that its device stops waiting; from any thread, also during `open`.

        Each has a thread of its own: one that hangs or fails must not keep the others from being aborted.
        """
        self._aborted.is_set = True
        for group in (*self._own_pairs(), *self._collectives.process_groups()):
            threading.Thread(target=_abort, args=(group,), name="abort", daemon=True).start()

    def close(self) -> None:
        """Destroy all communicators of this rank; after an abort, as far as that is possible."""
        if not self._aborted.is_set:
            self.trim()
            return
        for group in (*self._own_pairs(), *self._collectives.process_groups()):
            try:
                dist.destroy_process_group(group)
            except Exception as error:  # whatever NCCL says of what was aborted
                log.debug("An aborted communicator cannot be destroyed: %s.", error)
        self._pairs.clear()
        self._receives.clear()

    def _own_pairs(self) -> list[dist.ProcessGroup]:
        """Return the pairs of which this rank is an end; from any thread."""
        return [pair for pair in [*self._pairs.values()] if pair is not None]

    def _beside(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def _of(self, channel: Channel) -> dist.ProcessGroup:
        pair = self._pairs[channel]
        assert pair is not None, "this rank is at one end"
        return pair

    def _measured(self, greet: partial[None]) -> None:
        """Let a new communicator carry something, and note by how much less memory is free then."""
        self._aborted.check()
        before, _ = torch.cuda.mem_get_info(self.device)
        greet()
        self.reached().wait(0.0)
        after, _ = torch.cuda.mem_get_info(self.device)
        self._sizes.append(max(0, before - after))

    def _greet(self, channel: Channel) -> None:
        sender, receiver = channel
        element = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if self.rank == sender:
            self.send([element], peer=receiver).wait(0.0)
        else:
            self.receive([element], peer=sender).wait(0.0)

    def _greet_group(self, group: Group) -> None:
        """Sum and copy in the sizes that training uses: NCCL connects an algorithm when it is first chosen."""
        for count in (1, PIECE_BYTES // 4):
            numbers = torch.zeros(count, dtype=torch.float32, device=self.device)
            self.all_reduce(numbers, group=group).wait(0.0)
        self.broadcast(numbers[:1], source=group[0], group=group).wait(0.0)


def in_rounds(groups: Sequence[T]) -> list[T]:
    """Sort groups of ranks so that disjoint ones follow each other: first those of a first round, then of the next.

    Every rank goes through its groups in this order, so members of one round do not wait for each other.
    """
    rounds: list[list[T]] = []
    for group in groups:
        disjoint = (one for one in rounds if not any({*group} & {*other} for other in one))
        row = next(disjoint, None)
        if row is None:
            rounds.append(row := [])
        row.append(group)
    return [group for row in rounds for group in row]


@contextmanager
def _errors_left_to_us() -> Iterator[None]:
    """Keep torch's watchdog from ending the process for an error of the groups that are made now.

    It would do so within a second of a peer's death, before anybody has heard which rank has failed and why. A rank's
    guard hears of it, names it, and has the communicators aborted. What the user has set stays.
    """
    if _HANDLING in os.environ:
        yield
        return
    os.environ[_HANDLING] = "0"
    try:
        yield
    finally:
        del os.environ[_HANDLING]


def _abort(group: dist.ProcessGroup) -> None:
    try:
        group.abort()
    except Exception as error:  # whatever NCCL says: the others are aborted all the same
        log.warning("A communicator cannot be aborted: %s.", error)
