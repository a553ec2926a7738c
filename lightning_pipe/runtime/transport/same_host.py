"""Messages between processes of one host: Unix sockets, and memory that both ends share.

Gloo takes 0.15 to 0.4 ms of both ranks for the smallest message (measured on Linux 6.18): the receiver announces its
buffer, threads of both ends wake for it, and spin for the lock of the connection. Here the thread that has a message
writes it, and the thread that needs it reads it; no other takes part. So a message is taken when its receiver next
waits for any. Every directed channel is a connection of its own, and keeps the order of its messages
(`host_channel.py`).

Which ranks share a host is found out by trying: sockets of the abstract namespace do not reach beyond a network
namespace. Not so on macOS, which has no such names, nor namespaces; there a socket has a file.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from lightning_pipe.runtime.transport.host_channel import INLINE_BYTES, Expected, Inbox, Outbox
from lightning_pipe.runtime.transport.protocol import Channel, Group

Purpose: TypeAlias = tuple[str, Group]  # of a channel, and the group whose sums it serves
MESSAGES: Purpose = ("messages", ())  # between stages
_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<{_TOKEN_BYTES}si")  # token of the caller, its rank
_PATIENCE_S = 10.0  # with a caller who has connected and says nothing


@dataclass(frozen=True)
class _Listing:
    """Where a rank listens, and by what it is known when it calls others; no address where it cannot listen."""

    address: str
    token: bytes


class SameHost:
    """The connections of a rank with others on its host.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._listings: list[_Listing] = []
        self._listener: socket.socket | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tried: set[tuple[Purpose, Channel]] = set()
        self._reached: set[tuple[Purpose, Channel]] = set()
        self._outboxes: dict[tuple[Purpose, int], Outbox] = {}  # by whose exchanges it carries, and peer
        self._inboxes: dict[tuple[Purpose, int], Inbox] = {}

    def open(self, channels: Sequence[Channel], *, world: dist.ProcessGroup, of: Purpose = MESSAGES) -> bool:
        """Connect what is new among channels and stays on a host; return whether all do. On all ranks together.

        Args:
            channels: senders and receivers.
            world: of all ranks.
            of: what they are for; messages of one purpose do not wait for those of another.
        """
        new = [channel for channel in channels if (of, channel) not in self._tried]
        if not new:
            return self._reached.issuperset((of, channel) for channel in channels)
        self._tried.update((of, channel) for channel in new)
        if not self._listings:
            self._listings = self._listed(world)
        reached = torch.zeros(len(new), dtype=torch.uint8)
        for number, (sender, receiver) in enumerate(new):
            if sender == self._rank and (line := self._call(receiver)) is not None:
                self._outboxes[of, receiver] = Outbox(line)
                reached[number] = 1
        dist.all_reduce(reached, group=world)
        self._reached.update((of, channel) for channel, ok in zip(new, reached.tolist(), strict=True) if ok)
        mine = {
            sender for sender, receiver in new if receiver == self._rank and (of, (sender, receiver)) in self._reached
        }
        while mine:
            sender, line = self._answer()
            self._inboxes[of, sender] = Inbox(line)
            mine.discard(sender)
        return self._reached.issuperset((of, channel) for channel in channels)

    def sends_to(self, peer: int, *, of: Purpose = MESSAGES) -> bool:
        """Return whether messages to a rank go this way."""
        return (of, peer) in self._outboxes

    def hears_from(self, peer: int, *, of: Purpose = MESSAGES) -> bool:
        """Return whether messages of a rank come this way."""
        return (of, peer) in self._inboxes

    def send(self, tensors: Sequence[torch.Tensor], *, peer: int, of: Purpose = MESSAGES) -> Passage:
        """Send contiguous host tensors; what they hold is taken now."""
        outbox = self._outboxes[of, peer]
        number = outbox.send(tensors)
        return Passage(self, outbox, lambda: outbox.left >= number)

    def receive(
        self,
        buffers: Sequence[torch.Tensor],
        *,
        peer: int,
        of: Purpose = MESSAGES,
        owners: Sequence[torch.Tensor] = (),
    ) -> Passage:
        """Expect the next message of a rank.

        Args:
            buffers: contiguous, on the host.
            peer: the rank.
            of: what the channel is for.
            owners: tensors whose memory the buffers are, if they may have other memory when the message is there.
        """
        sizes = tuple(buffer.nbytes for buffer in buffers)
        return self._expect(Expected(sizes, tuple(buffers), tuple(owners)), self._inboxes[of, peer])

    def take(self, byte_count: int, take: Callable[[torch.Tensor], None], *, peer: int, of: Purpose) -> Passage:
        """Expect the next message of a rank, of more than `INLINE_BYTES`.

        Args:
            byte_count: of its only tensor.
            take: called in some wait of this rank with the bytes that have come, which are nobody else's.
            peer: the rank.
            of: what the channel is for.
        """
        assert byte_count > INLINE_BYTES, "less comes without a slot"
        return self._expect(Expected((byte_count,), take=lambda parts: take(*parts)), self._inboxes[of, peer])

    def _expect(self, expected: Expected, inbox: Inbox) -> Passage:
        inbox.expect(expected)
        return Passage(self, inbox, lambda: expected.is_over)

    def wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Move messages of all channels until something is over; return whether it is, within the time."""
        end = time.monotonic() + timeout_s
        while not is_over():
            left = end - time.monotonic()
            if left <= 0:
                return False
            poll = select.poll()
            for inbox in self._inboxes.values():
                if inbox.expected and not inbox.error:
                    poll.register(inbox.line, select.POLLIN)
            for outbox in self._outboxes.values():
                if outbox.queue and not outbox.error:
                    poll.register(outbox.line, select.POLLOUT)
            poll.poll(left * 1e3)
            self.move()
        return True

    def move(self) -> None:
        """Take what has come, and write what had no room."""
        for inbox in self._inboxes.values():
            if inbox.expected:
                inbox.move()
            else:
                inbox.give_back()
        for outbox in self._outboxes.values():
            if outbox.queue:
                outbox.move()

    def trim(self) -> None:
        """Give up the memory of slots that no message is in, as far as their receivers have said so."""
        for outbox in self._outboxes.values():
            outbox.trim()

    def close(self) -> None:
        """End all connections."""
        for outbox in self._outboxes.values():
            outbox.close()
        for inbox in self._inboxes.values():
            inbox.close()
        self._outboxes.clear()
        self._inboxes.clear()
        if self._listener is not None:
            self._listener.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._listener, self._folder, self._listings = None, None, []
        self._tried.clear()
        self._reached.clear()

    def _listed(self, world: dist.ProcessGroup) -> list[_Listing]:
        """Begin to listen, and return where all ranks do."""
        listings: list[_Listing | None] = [None] * dist.get_world_size(world)
        dist.all_gather_object(
            listings, _Listing(self._listen(len(listings)), secrets.token_bytes(_TOKEN_BYTES)), group=world
        )
        return [listing for listing in listings if listing is not None]

    def _listen(self, ranks: int) -> str:
        """Return the address of a new listener; "" if there can be none."""
        name = f"lightning_pipe.{secrets.token_hex(_TOKEN_BYTES)}"
        try:
            if sys.platform == "linux":
                address = f"\0{name}"
            else:
                self._folder = tempfile.TemporaryDirectory(prefix="pipe")
                address = str(Path(self._folder.name) / "ranks")
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(address)
            self._listener.listen(max(ranks, socket.SOMAXCONN))
            self._listener.settimeout(_PATIENCE_S)
        except OSError:
            return ""
        return address

    def _call(self, peer: int) -> socket.socket | None:
        """Connect to a rank; None if it is not on this host."""
        address, mine = self._listings[peer].address, self._listings[self._rank]
        if not address or not mine.address:
            return None
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.connect(address)
            line.sendall(_HELLO.pack(mine.token, self._rank))
        except OSError:
            line.close()
            return None
        line.setblocking(False)
        return line

    def _answer(self) -> tuple[int, socket.socket]:
        """Return the next rank that has connected; others who try are turned away."""
        assert self._listener is not None, "somebody has reached it"
        while True:
            line, _ = self._listener.accept()
            line.settimeout(_PATIENCE_S)
            with contextlib.suppress(OSError):
                said = line.recv(_HELLO.size, socket.MSG_WAITALL)
                if len(said) == _HELLO.size:
                    token, rank = _HELLO.unpack(said)
                    if 0 <= rank < len(self._listings) and hmac.compare_digest(token, self._listings[rank].token):
                        line.setblocking(False)
                        return rank, line
            line.close()


@dataclass(frozen=True)
class Passage:
    """A message on its way out or in, through `box`; `landed` tells whether it has left, or is in its buffers."""

    host: SameHost
    box: Outbox | Inbox
    landed: Callable[[], bool]

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long until the message has landed; return whether it has.

        Raises:
            RuntimeError: if the connection is gone.
        """
        if not self.landed():
            self.box.move()
        return self.has_ended() or self.host.wait(self.has_ended, timeout_s)

    def has_ended(self) -> bool:
        """Return whether the message has landed.

        Raises:
            RuntimeError: if the connection is gone.
        """
        if self.landed():
            return True
        if self.box.error:
            raise RuntimeError(self.box.error)
        return False
