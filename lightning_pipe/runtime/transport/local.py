"""Local transport: ranks in one thread, through a hub. For tests, and for several stages on one device.

A transfer is done once both sides have posted it, a sum once all members have; so ranks are run by
`waiting.drive_together`. Sums are made in rank order. Shapes and element types must be those that were announced.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightning_pipe.core.program import Launches
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.transport.protocol import Channel, Group
from lightning_pipe.runtime.waiting import Done, Handle


@dataclass
class _Meeting:
    """A collective under way: the tensors of the members that have come; the result is in all of them once `held`."""

    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    held: bool = False


class Hub:
    """The place where the ranks of one thread meet.

    Example:
        >>> hub = Hub()
        >>> a, b = hub.endpoint(0), hub.endpoint(1)
    """

    def __init__(self) -> None:
        self._posts: dict[Channel, deque[tuple[torch.Tensor, ...]]] = defaultdict(deque)
        self._receives: dict[Channel, deque[_Receive]] = defaultdict(deque)
        self.meetings: dict[tuple[Group, int], _Meeting] = defaultdict(_Meeting)

    def endpoint(self, rank: int) -> LocalTransport:
        """Return the transport of one rank."""
        return LocalTransport(self, rank)

    def post(self, channel: Channel, tensors: tuple[torch.Tensor, ...]) -> None:
        """Fill the longest waiting receive of the channel, or keep the tensors for the next one."""
        if self._receives[channel]:
            self._receives[channel].popleft().fill(tensors)
        else:
            self._posts[channel].append(tensors)

    def expect(self, channel: Channel, receive: _Receive) -> None:
        """Fill the receive with the oldest tensors of the channel, or let it wait."""
        if self._posts[channel]:
            receive.fill(self._posts[channel].popleft())
        else:
            self._receives[channel].append(receive)


class LocalTransport:
    """The transport of one rank of a hub."""

    launches: Launches = "on host"
    communicator_bytes = 0
    device: torch.device | None = None

    def __init__(self, hub: Hub, rank: int) -> None:
        self.rank = rank
        self._hub = hub
        self._met: dict[Group, int] = defaultdict(int)

    def open(self, *, channels: Sequence[Channel], groups: Sequence[Group]) -> None:
        """Do nothing: a hub has all channels."""

    def begin(self, *, is_first: bool) -> None:
        """Do nothing."""

    def send(self, tensors: Sequence[torch.Tensor], *, peer: int) -> Handle:
        """Leave the tensors at the hub."""
        self._hub.post((self.rank, peer), tuple(tensors))
        return Done()

    def receive(self, buffers: Sequence[torch.Tensor], *, peer: int, owners: Sequence[torch.Tensor] = ()) -> Handle:
        """Take a place in the queue of the channel."""
        receive = _Receive(tuple(buffers), channel=(peer, self.rank))
        self._hub.expect((peer, self.rank), receive)
        return receive

    def all_reduce(self, tensor: torch.Tensor, *, group: Group) -> Handle:
        """Come to the next meeting of the group and sum."""
        return _Collective(self._come(tensor, group), group, source=None)

    def broadcast(self, tensor: torch.Tensor, *, source: int, group: Group) -> Handle:
        """Come to the next meeting of the group and copy."""
        return _Collective(self._come(tensor, group), group, source=source)

    def reached(self) -> Handle:
        """Return what needs no waiting."""
        return Done()

    def trim(self) -> None:
        """Do nothing: nothing is kept."""

    def abort(self) -> None:
        """Do nothing: nobody waits."""

    def close(self) -> None:
        """Do nothing: the hub goes with its last endpoint."""

    def _come(self, tensor: torch.Tensor, group: Group) -> _Meeting:
        meeting = self._hub.meetings[group, self._met[group]]
        self._met[group] += 1
        meeting.tensors[self.rank] = tensor
        return meeting


class _Receive:
    def __init__(self, buffers: tuple[torch.Tensor, ...], *, channel: Channel) -> None:
        self._buffers, self._channel = buffers, channel
        self._filled = False

    def wait(self, timeout_s: float) -> bool:
        return self._filled

    def landed(self) -> bool:
        return self._filled

    def fill(self, tensors: tuple[torch.Tensor, ...]) -> None:
        found = [(tuple(t.shape), t.dtype) for t in tensors]
        expected = [(tuple(b.shape), b.dtype) for b in self._buffers]
        if found != expected:
            sender, receiver = self._channel
            raise PipelineError(
                f"Rank {sender} sent {found} to rank {receiver}, which expected {expected}. "
                "Shapes follow from the values of the split and the samples of the message; one of them is wrong."
            )
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor)
        self._filled = True


class _Collective:
    def __init__(self, meeting: _Meeting, group: Group, *, source: int | None) -> None:
        self._meeting, self._group, self._source = meeting, group, source

    def wait(self, timeout_s: float) -> bool:
        if not self._meeting.held and len(self._meeting.tensors) == len(self._group):
            self._hold()
        return self._meeting.held

    def landed(self) -> bool:
        return self._meeting.held

    def _hold(self) -> None:
        tensors = self._meeting.tensors
        if self._source is None:
            result = tensors[self._group[0]].clone()
            for rank in self._group[1:]:
                result += tensors[rank]
        else:
            result = tensors[self._source].clone()
        for tensor in tensors.values():
            tensor.copy_(result)
        self._meeting.held = True
        tensors.clear()
