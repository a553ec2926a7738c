"""NCCL transport: every directed channel has a communicator of its own.

Operations on one communicator are executed one after another, so a channel that were shared by both directions could
make a send wait for a receive that waits for it; and communicators that are created lazily hang if two ranks create
them in different orders. So `open` creates them in one global order on all ranks, and sends one element over each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_pipe.runtime.transport.collectives import Collectives, StreamWork, irecv, isend
from lightning_pipe.runtime.transport.protocol import Channel, Group
from lightning_pipe.runtime.waiting import Handle


class NcclTransport:
    """Carry tensors over NCCL.

    Args:
        rank: this rank.
        device: its device.
        timeout_s: after which torch gives up an operation by itself; longer than every deadline of ours.
    """

    def __init__(self, *, rank: int, device: torch.device, timeout_s: float) -> None:
        self.rank = rank
        self._device = device
        self._collectives = Collectives("nccl", timeout_s=timeout_s)
        self._pairs: dict[Channel, dist.ProcessGroup | None] = {}  # None: this rank is at neither end

    def open(self, *, channels: Sequence[Channel], groups: Sequence[Group]) -> None:
        """Create what is missing, in the order of the arguments; on every rank with the same arguments."""
        for channel in channels:
            if channel not in self._pairs:
                self._pairs[channel] = self._collectives.new_group(channel)
                self._greet(channel)
        self._collectives.open(groups)

    def send(self, tensors: Sequence[torch.Tensor], *, peer: int) -> Handle:
        """Post the sending of tensors."""
        full = tuple(tensor for tensor in tensors if tensor.numel())
        group = self._of((self.rank, peer))
        return StreamWork(tuple(isend(tensor, peer=peer, group=group) for tensor in full), full)

    def receive(self, buffers: Sequence[torch.Tensor], *, peer: int, owners: Sequence[torch.Tensor] = ()) -> Handle:
        """Post the receiving of tensors."""
        full = tuple(buffer for buffer in buffers if buffer.numel())
        group = self._of((peer, self.rank))
        return StreamWork(tuple(irecv(buffer, peer=peer, group=group) for buffer in full), full)

    def all_reduce(self, tensor: torch.Tensor, *, group: Group) -> Handle:
        """Post a sum, in place."""
        return self._collectives.all_reduce(tensor, group=group)

    def broadcast(self, tensor: torch.Tensor, *, source: int, group: Group) -> Handle:
        """Post the copying of the source's tensor into those of the other members."""
        return self._collectives.broadcast(tensor, source=source, group=group)

    def trim(self) -> None:
        """Do nothing: communicators keep what they need."""

    def abort(self) -> None:
        """Abort all communicators of this rank, so that its device stops waiting."""
        for pair in self._mine():
            pair.abort()
        self._collectives.abort()

    def close(self) -> None:
        """Destroy all communicators of this rank."""
        for pair in self._mine():
            dist.destroy_process_group(pair)
        self._pairs.clear()
        self._collectives.close()

    def _mine(self) -> list[dist.ProcessGroup]:
        return [pair for pair in self._pairs.values() if pair is not None]

    def _of(self, channel: Channel) -> dist.ProcessGroup:
        pair = self._pairs[channel]
        assert pair is not None, "this rank is at one end"
        return pair

    def _greet(self, channel: Channel) -> None:
        sender, receiver = channel
        if self.rank not in channel:
            return
        element = torch.zeros(1, dtype=torch.uint8, device=self._device)
        if self.rank == sender:
            self.send([element], peer=receiver).wait(0)
        else:
            self.receive([element], peer=sender).wait(0)
        torch.cuda.synchronize(self._device)
