"""A transport between ranks of one thread that does everything as late as a device may, for tests.

A message is read when somebody waits for it, not when it is posted, and its buffers hold NaN until then. The host hears
that messages have landed only when it waits for the device. What handles keep is counted.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from lightning_pipe.runtime.transport.local import Hub, LocalTransport
from lightning_pipe.runtime.transport.protocol import Channel
from lightning_pipe.runtime.waiting import Handle


class LateMessage:
    """A message of which one end, or both, were posted."""

    def __init__(self) -> None:
        self.source: tuple[torch.Tensor, ...] | None = None
        self.target: tuple[torch.Tensor, ...] | None = None
        self.has_moved = self.has_landed = False

    def move(self) -> bool:
        """Copy the message if both ends were posted; return whether that is so."""
        if not self.has_moved and self.source is not None and self.target is not None:
            with torch.no_grad():
                for buffer, tensor in zip(self.target, self.source, strict=True):
                    assert (buffer.shape, buffer.dtype) == (tensor.shape, tensor.dtype)
                    buffer.copy_(tensor)
            self.source, self.target = (), ()
            self.has_moved = True
        return self.has_moved


# by hub, the messages of every channel in order
_MESSAGES: WeakKeyDictionary[Hub, dict[Channel, list[LateMessage]]] = WeakKeyDictionary()


class LateTransport(LocalTransport):
    """The transport of one rank.

    Attributes:
        bytes: that handles keep now.
    """

    def __init__(self, hub: Hub, rank: int) -> None:
        super().__init__(hub, rank)
        self._messages = _MESSAGES.setdefault(hub, defaultdict(list))
        self._posted: dict[Channel, int] = defaultdict(int)
        self._moving: list[LateMessage] = []
        self.bytes = 0

    def send(self, tensors: Sequence[torch.Tensor], *, peer: int) -> Handle:
        """Post a message that is read when somebody waits for it."""
        message = self._next((self.rank, peer))
        message.source = tuple(tensors)
        return _LateHandle(self, message, tensors)

    def receive(self, buffers: Sequence[torch.Tensor], *, peer: int, owners: Sequence[torch.Tensor] = ()) -> Handle:
        """Post the receiving of a message; nobody may read the buffers until it was waited for."""
        for buffer in buffers:
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
        message = self._next((peer, self.rank))
        message.target = tuple(buffers)
        return _LateHandle(self, message, buffers)

    def reached(self) -> Handle:
        """Return the handle of the device, which lets the host see what has landed."""
        return _Device(self._moving)

    def count(self, change: int) -> None:
        """Count bytes that a handle keeps, or keeps no longer."""
        self.bytes += change

    def _next(self, channel: Channel) -> LateMessage:
        number, messages = self._posted[channel], self._messages[channel]
        self._posted[channel] += 1
        if len(messages) == number:
            messages.append(LateMessage())
        self._moving.append(messages[number])
        return messages[number]


class _LateHandle:
    def __init__(self, transport: LateTransport, message: LateMessage, tensors: Sequence[torch.Tensor]) -> None:
        self._message = message
        size = sum(tensor.nbytes for tensor in tensors)
        transport.count(size)
        self._let_go = weakref.finalize(self, transport.count, -size)

    def wait(self, timeout_s: float) -> bool:
        if not self._message.move():
            return False
        self._let_go()
        return True

    def landed(self) -> bool:
        return self._message.has_landed


class _Device:
    def __init__(self, messages: list[LateMessage]) -> None:
        self._messages = messages

    def wait(self, timeout_s: float) -> bool:
        for message in self._messages:
            message.has_landed = message.has_moved
        return True

    def landed(self) -> bool:
        return all(message.has_landed for message in self._messages)
