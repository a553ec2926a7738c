"""Transport of a device whose first run of each program goes over the host.

What is launched on a device for the first time may make the host wait for the whole device: kernels are loaded,
libraries take workspaces, Triton tunes, pinned memory is made. With messages under way on the device (NCCL) the host
would wait for a peer that waits for what this rank has not launched. While a program runs for the first time, its
messages and sums therefore go over the host, where nothing on the device waits for another rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_pipe.core.program import Launches
from lightning_pipe.runtime.transport.protocol import Channel, Group, Transport
from lightning_pipe.runtime.waiting import Handle


class StagedTransport:
    """Carry the first run of each program by one transport, and everything else by another.

    Args:
        device: carries tensors from device to device.
        host: carries the same tensors over the host.

    Attributes:
        launches: how the transport of the device launches receives.
        device: which carries out what is posted, but in first runs.
    """

    def __init__(self, device: Transport, host: Transport) -> None:
        self.rank = device.rank
        self.launches: Launches = device.launches
        self.device = device.device
        self._device, self._host = device, host
        self._current = device

    @property
    def communicator_bytes(self) -> int:
        """Return the bytes of the device that a communicator takes."""
        return self._device.communicator_bytes

    def open(self, *, channels: Sequence[Channel], groups: Sequence[Group]) -> None:
        """Create what is missing in both."""
        self._host.open(channels=channels, groups=groups)
        self._device.open(channels=channels, groups=groups)

    def begin(self, *, is_first: bool) -> None:
        """Choose what carries a program."""
        self._current = self._host if is_first else self._device

    def send(self, tensors: Sequence[torch.Tensor], *, peer: int) -> Handle:
        """Post the sending of tensors."""
        return self._current.send(tensors, peer=peer)

    def receive(self, buffers: Sequence[torch.Tensor], *, peer: int, owners: Sequence[torch.Tensor] = ()) -> Handle:
        """Post the receiving of tensors."""
        return self._current.receive(buffers, peer=peer, owners=owners)

    def all_reduce(self, tensor: torch.Tensor, *, group: Group) -> Handle:
        """Post a sum, in place."""
        return self._current.all_reduce(tensor, group=group)

    def broadcast(self, tensor: torch.Tensor, *, source: int, group: Group) -> Handle:
        """Post the copying of the source's tensor into those of the other members."""
        return self._current.broadcast(tensor, source=source, group=group)

    def reached(self) -> Handle:
        """Return the handle of all that was posted and waited for until now."""
        return self._device.reached()

    def trim(self) -> None:
        """Give up what is kept for messages and groups to come."""
        self._host.trim()
        self._device.trim()

    def abort(self) -> None:
        """End every wait of this rank with an error, from any thread."""
        self._device.abort()
        self._host.abort()

    def close(self) -> None:
        """Release channels and groups of both."""
        self._device.close()
        self._host.close()
