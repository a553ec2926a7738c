"""Transport protocol: directed channels between pairs of ranks, sums and broadcasts over groups.

Nothing but the tensors travels: the receiver knows shapes and element types from `Value.size(samples)`. Everything is
posted without blocking and waited for through its handle. Channels and groups are opened on all ranks together, in one
global order, before the first program that uses them: communicators created lazily and in different orders on
different ranks hang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from lightning_pipe.runtime.waiting import Handle

Channel = tuple[int, int]  # sender, receiver
Group = tuple[int, ...]  # ranks, ascending


class Transport(Protocol):
    """Carry tensors between the ranks of a pipeline."""

    rank: int

    def open(self, *, channels: Sequence[Channel], groups: Sequence[Group]) -> None:
        """Create what is missing. Every rank calls it with the same arguments, and may wait for the others there."""
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

    def trim(self) -> None:
        """Give up memory that is kept for messages to come. Nothing is under way."""
        ...

    def abort(self) -> None:
        """End every wait of this rank with an error, from any thread. Nothing can be sent afterwards."""
        ...

    def close(self) -> None:
        """Release channels and groups. Every rank calls it, with nothing under way."""
        ...
