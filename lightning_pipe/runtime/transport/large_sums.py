"""Sums of large tensors of ranks on one host: a reduce-scatter and an all-gather, by messages to all members.

A tensor has a part per member. Everybody sends each member its part; who has its part from all adds them, and sends the
sum to the others, so all have the same bits. That is done whenever messages are moved, by the rank's own thread: a sum
goes on when the next is begun, and while the rank waits for anything. Parts are added where they lie, in the slots.

A tensor is added in pieces, few at a time: they fit into caches, and slots need not hold all of it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

import torch

from lightning_pipe.runtime.transport.collectives import as_bytes
from lightning_pipe.runtime.transport.protocol import Group
from lightning_pipe.runtime.transport.same_host import Passage, Purpose, SameHost

_PIECE_BYTES = 8 * 2**20  # at most; all pieces of a tensor have the same size
_MOST_UNDER_WAY_BYTES = 16 * 2**20  # of a group: what a rank that is ahead may put into slots


def channels_of(group: Group) -> tuple[Purpose, Purpose]:
    """Return what the channels between members are for: parts, and sums of parts."""
    return ("parts", group), ("sums", group)


class LargeSums:
    """Add large tensors within groups whose members are connected by `channels_of`.

    Args:
        rank: this rank.
        host: its connections.
    """

    def __init__(self, rank: int, host: SameHost) -> None:
        self._rank, self._host = rank, host
        self._waiting: defaultdict[Group, deque[_Piece]] = defaultdict(deque)  # to be started, in order
        self._bytes: defaultdict[Group, int] = defaultdict(int)  # of pieces that were started and are not over

    def begin(self, tensor: torch.Tensor, group: Group) -> LargeSum:
        """Begin to add a contiguous tensor, in place; all members begin the same sums of a group in the same order."""
        self._host.move()
        pieces = [
            _Piece(self._host, part, rank=self._rank, group=group, over=self._over)
            for part in tensor.view(-1).tensor_split(-(-tensor.nbytes // _PIECE_BYTES))
        ]
        self._waiting[group] += pieces
        self._go_on(group)
        return LargeSum(self._host, pieces)

    def close(self) -> None:
        """Forget what is under way."""
        self._waiting.clear()
        self._bytes.clear()

    def _go_on(self, group: Group) -> None:
        """Start the next pieces, while there is not too much under way."""
        waiting = self._waiting[group]
        while waiting and (
            not self._bytes[group] or self._bytes[group] + waiting[0].byte_count <= _MOST_UNDER_WAY_BYTES
        ):
            piece = waiting.popleft()
            self._bytes[group] += piece.byte_count
            piece.start()

    def _over(self, piece: _Piece) -> None:
        self._bytes[piece.group] -= piece.byte_count
        self._go_on(piece.group)


class LargeSum:
    """One sum; a handle.

    Args:
        host: the connections of this rank.
        pieces: what is added.
    """

    def __init__(self, host: SameHost, pieces: list[_Piece]) -> None:
        self._host, self._pieces = host, pieces

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long for the sum.

        Raises:
            RuntimeError: if a connection is gone.
        """
        return self._host.wait(lambda: all(piece.has_ended() for piece in self._pieces), timeout_s)

    def landed(self) -> bool:
        """Return whether the sum is there."""
        return all(piece.landed() for piece in self._pieces)


class _Piece:
    """A part of a tensor that is added.

    Args:
        host: the connections of this rank.
        tensor: contiguous.
        rank: this rank.
        group: the members.
        over: called when the sums of all parts have come.
    """

    def __init__(
        self, host: SameHost, tensor: torch.Tensor, *, rank: int, group: Group, over: Callable[[_Piece], None]
    ) -> None:
        self.group, self.byte_count = group, tensor.nbytes
        self._host, self._over = host, over
        self._of_parts, self._of_sums = channels_of(group)
        self._parts = dict(zip(group, tensor.view(-1).tensor_split(len(group)), strict=True))
        self._mine = self._parts.pop(rank)
        self._theirs: dict[int, torch.Tensor] = {}  # my part, as the others have it
        self._to_come = len(self._parts)
        self._passages: list[Passage] | None = None  # until it is started

    def start(self) -> None:
        """Send the others their parts."""
        self._passages = []
        for peer, part in self._parts.items():
            self._expect(self._mine, partial(self._part_came, peer), peer=peer, of=self._of_parts)
            self._expect(part, partial(self._sum_came, peer), peer=peer, of=self._of_sums)
        for peer, part in self._parts.items():
            self._send(part, peer=peer, of=self._of_parts)

    def landed(self) -> bool:
        """Return whether the sum is there."""
        return self._passages is not None and all(passage.landed() for passage in self._passages)

    def has_ended(self) -> bool:
        """Return whether it is there, or cannot come.

        Raises:
            RuntimeError: if a connection is gone.
        """
        return self._passages is not None and all(passage.has_ended() for passage in self._passages)

    def _expect(self, part: torch.Tensor, take: Callable[[torch.Tensor], None], *, peer: int, of: Purpose) -> None:
        assert self._passages is not None, "started"
        self._passages.append(self._host.take(part.nbytes, take, peer=peer, of=of))

    def _send(self, part: torch.Tensor, *, peer: int, of: Purpose) -> None:
        assert self._passages is not None, "started"
        self._passages.append(self._host.send([part], peer=peer, of=of))

    def _part_came(self, peer: int, content: torch.Tensor) -> None:
        self._theirs[peer] = content.view(self._mine.dtype)
        if len(self._theirs) < len(self._parts):
            return
        with torch.no_grad():
            for other in self._parts:  # in the order of ranks
                self._mine.add_(self._theirs.pop(other))
        for other in self._parts:
            self._send(self._mine, peer=other, of=self._of_sums)

    def _sum_came(self, peer: int, content: torch.Tensor) -> None:
        as_bytes(self._parts[peer]).copy_(content)
        self._to_come -= 1
        if not self._to_come:
            self._over(self)
