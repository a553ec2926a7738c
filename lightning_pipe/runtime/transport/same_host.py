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

import errno
import secrets
import select
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist

from lightning_pipe.runtime.callers import PATIENCE_S, TOKEN_BYTES, Caller, Callers, hello
from lightning_pipe.runtime.transport.host_channel import INLINE_BYTES, Expected, Inbox, Outbox
from lightning_pipe.runtime.transport.protocol import Channel, Group

Purpose: TypeAlias = tuple[str, Group]  # of a channel, and the group whose sums it serves
MESSAGES: Purpose = ("messages", ())  # between stages
_PATIENCE_S = 60.0  # with ranks that have begun to connect, or cannot as strangers crowd the listener
_LOOK_S = 0.01


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
        self._callers: Callers | None = None
        self._early: list[Caller] = []  # who call for an opening that this rank has not begun
        self._openings = 0  # which all ranks count alike
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
        self._openings += 1
        if not self._listings:
            self._listings = self._listed(world)
        reached = torch.zeros(len(new), dtype=torch.uint8)
        lines: dict[int, socket.socket] = {}
        for number, (sender, receiver) in enumerate(new):
            if sender == self._rank and (line := self._line_to(receiver)) is not None:
                lines[receiver] = line
                reached[number] = 1
        dist.all_reduce(reached, group=world)
        self._reached.update((of, channel) for channel, ok in zip(new, reached.tolist(), strict=True) if ok)
        mine = {
            sender for sender, receiver in new if receiver == self._rank and (of, (sender, receiver)) in self._reached
        }
        self._outboxes.update({(of, receiver): Outbox(line) for receiver, line in lines.items()})
        self._inboxes.update({(of, sender): Inbox(line) for sender, line in self._met(lines, mine).items()})
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
        for caller in self._early:
            caller.connection.close()
        self._outboxes.clear()
        self._inboxes.clear()
        self._early.clear()
        if self._callers is not None:
            self._callers.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._callers, self._folder, self._listings, self._openings = None, None, [], 0
        self._tried.clear()
        self._reached.clear()

    def _listed(self, world: dist.ProcessGroup) -> list[_Listing]:
        """Begin to listen, and return where all ranks do."""
        listings: list[_Listing | None] = [None] * dist.get_world_size(world)
        dist.all_gather_object(
            listings, _Listing(self._listen(len(listings)), secrets.token_bytes(TOKEN_BYTES)), group=world
        )
        return [listing for listing in listings if listing is not None]

    def _listen(self, ranks: int) -> str:
        """Return the address of a new listener; "" if there can be none."""
        name = f"lightning_pipe.{secrets.token_hex(16)}"
        try:
            if sys.platform == "linux":
                address = f"\0{name}"
            else:
                self._folder = tempfile.TemporaryDirectory(prefix="pipe")
                address = str(Path(self._folder.name) / "ranks")
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(address)
            listener.listen(max(ranks, socket.SOMAXCONN))
            self._callers = Callers([listener], self._token_of)
        except OSError:
            return ""
        return address

    def _token_of(self, rank: int) -> bytes | None:
        return self._listings[rank].token if rank < len(self._listings) else None

    def _line_to(self, peer: int) -> socket.socket | None:
        """Return a connection that is made or can be made to a rank; None if it is not on this host."""
        if not self._listings[peer].address or not self._listings[self._rank].address:
            return None
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        line.setblocking(False)
        try:
            self._call(line, peer)
        except OSError:
            line.close()
            return None
        return line

    def _call(self, line: socket.socket, peer: int) -> bool:
        """Connect to a rank and say who calls; return whether that was possible now: too many others may wait there.

        Raises:
            OSError: if nobody listens there.
        """
        try:
            line.connect(self._listings[peer].address)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EISCONN:
                raise
            return True
        line.sendall(hello(self._listings[self._rank].token, self._rank, self._openings))
        return True

    def _met(self, lines: Mapping[int, socket.socket], senders: AbstractSet[int]) -> dict[int, socket.socket]:
        """Return the connections of ranks that call this one, once they are there and this one has reached the others.

        Raises:
            RuntimeError: if that takes too long.
        """
        found: dict[int, socket.socket] = {}
        calling, end = dict(lines), time.monotonic() + _PATIENCE_S
        while True:
            arrived, self._early = self._early, []
            for caller in arrived:
                if caller.topic == self._openings:
                    found[caller.rank] = caller.connection
                else:
                    self._early.append(caller)  # the rank has begun the next opening
            calling = {peer: line for peer, line in calling.items() if not self._call(line, peer)}
            if not calling and found.keys() >= senders:
                return found
            if time.monotonic() > end:
                raise RuntimeError(
                    f"no connection with ranks {sorted({*calling, *(senders - found.keys())})} of this host"
                )
            assert self._callers is not None, "who reaches others listens"
            poll = select.poll()
            poll.register(self._callers, select.POLLIN)
            poll.poll(1e3 * (_LOOK_S if calling else PATIENCE_S))
            self._early += self._callers.known()


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
