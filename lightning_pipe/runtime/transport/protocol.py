"""Transport protocol: directed channels between pairs of ranks, sums and broadcasts over groups.

Nothing but the tensors travels: the receiver knows shapes and element types from `Value.size(samples)`, or from sizes
that were sent before (`runtime.exchanges.sized_messages`). Everything is
posted without blocking and waited for through its handle. Channels and groups are opened on all ranks together, in one
global order, before the first program that uses them: communicators created lazily and in different orders on
different ranks hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lightning_pipe.core.program import Launches
from lightning_pipe.runtime.waiting import Handle

Channel = tuple[int, int]  # sender, receiver
Group = tuple[int, ...]  # ranks, ascending


class Transport(Protocol):
    """Carry tensors between the ranks of a pipeline.

    Attributes:
        rank: this rank.
        launches: how receives are launched; a program must be proved for that.
    """

    rank: int
    launches: Launches

    @property
    def device(self) -> torch.device | None:
        """Return what carries out whatever is posted, so that the host need not wait; None where the host does."""
        ...

    @property
    def communicator_bytes(self) -> int:
        """Return the bytes of the device that a pair or a group of ranks takes once it is open; 0 on the host."""
        ...

    def open(self, *, channels: Sequence[Channel], groups: Sequence[Group]) -> None:
        """Create what is missing. Every rank calls it with the same arguments, and may wait for the others there."""
        ...

    def begin(self, *, is_first: bool) -> None:
        """Begin a program; on all ranks that run it.

        Args:
            is_first: whether it runs for the first time, so that anything may be launched for the first time.
        """
        ...

    def send(self, tensors: Sequence[torch.Tensor], *, peer: int) -> Handle:
        """Post the sending of tensors; they are kept alive until the handle is done."""
        ...

    def receive(self, buffers: Sequence[torch.Tensor], *, peer: int, owners: Sequence[torch.Tensor] = ()) -> Handle:
        """Post the receiving into contiguous `buffers`, which are filled when the handle is done.

        Args:
            buffers: for what comes.
            peer: the sender.
            owners: for every buffer the tensor whose memory it is, and nobody else's. When the handle is done, an owner
                has what came, but perhaps in other memory; its buffer is of no use then.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor, *, group: Group) -> Handle:
        """Post the sum of `tensor` over the group, in place. Members post the same sums in the same order."""
        ...

    def broadcast(self, tensor: torch.Tensor, *, source: int, group: Group) -> Handle:
        """Post the copying of `tensor` from rank `source` into the `tensor` of every other member."""
        ...

    def reached(self) -> Handle:
        """Return the handle of all that was posted and waited for until now: on a device, that has really happened."""
        ...

    def trim(self) -> None:
        """Give up what is kept for messages to come: memory, and channels that `open` makes again where a program uses
        them. Every rank calls it, with nothing under way.
        """
        ...

    def abort(self) -> None:
        """End every wait of this rank with an error, from any thread. Nothing can be sent afterwards, and no handle of
        what was under way says that it has landed.
        """
        ...

    def close(self) -> None:
        """Release channels and groups. Every rank calls it, with nothing under way."""
        ...
