"""Sums of large tensors of ranks on one host: a reduce-scatter and an all-gather, by messages to all members.

A tensor has a part per member. Everybody sends each member its part; who has its part from all adds them, and sends the
sum to the others, so all have the same bits. That is done whenever messages are moved, by the rank's own thread: a sum
goes on when the next is begun, and while the rank waits for anything.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

import torch

from lightning_pipe.runtime.transport.protocol import Group
from lightning_pipe.runtime.transport.same_host import Purpose, SameHost

_MOST_UNDER_WAY_BYTES = 64 * 2**20  # of a group: what a rank that is ahead may put into slots


def purposes(group: Group) -> tuple[Purpose, Purpose]:
    """Return what the channels between members carry: parts, and sums of parts."""
    return ("parts", group), ("sums", group)


class LargeSums:
    """Add large tensors within groups whose members are connected for both `purposes`.

    Args:
        rank: this rank.
        host: its connections.
    """

    def __init__(self, rank: int, host: SameHost) -> None:
        self._rank, self._host = rank, host
        self._waiting: defaultdict[Group, deque[LargeSum]] = defaultdict(deque)  # to send their parts, in order
        self._bytes: defaultdict[Group, int] = defaultdict(int)  # of sums whose parts were sent and that are not over

    def begin(self, tensor: torch.Tensor, group: Group) -> LargeSum:
        """Begin to add a contiguous tensor, in place; all members begin the same sums of a group in the same order."""
        self._host.move()
        large = LargeSum(self._host, tensor, rank=self._rank, group=group, over=self._over)
        self._waiting[group].append(large)
        self._go_on(group)
        return large

    def close(self) -> None:
        """Forget what is under way."""
        self._waiting.clear()
        self._bytes.clear()

    def _go_on(self, group: Group) -> None:
        """Send the parts of the next sums, while there is not too much under way."""
        waiting = self._waiting[group]
        while waiting and (
            not self._bytes[group] or self._bytes[group] + waiting[0].byte_count <= _MOST_UNDER_WAY_BYTES
        ):
            large = waiting.popleft()
            self._bytes[group] += large.byte_count
            large.send_parts()

    def _over(self, large: LargeSum) -> None:
        self._bytes[large.group] -= large.byte_count
        self._go_on(large.group)


class LargeSum:
    """One sum; a handle.

    Args:
        host: the connections of this rank.
        tensor: contiguous.
        rank: this rank.
        group: the members.
        over: called when the sum is there.
    """

    def __init__(
        self, host: SameHost, tensor: torch.Tensor, *, rank: int, group: Group, over: Callable[[LargeSum], None]
    ) -> None:
        self.group, self.byte_count = group, tensor.nbytes
        self._host, self._rank, self._over = host, rank, over
        self._of_parts, self._of_sums = purposes(group)
        self._parts = dict(zip(group, tensor.view(-1).tensor_split(len(group)), strict=True))
        self._others = [peer for peer in group if peer != rank]
        theirs = {peer: torch.empty_like(self._parts[rank]) for peer in self._others}
        self._theirs, self._parts_to_come, self._sums_to_come = theirs, len(theirs), len(theirs)
        self._passages = [
            host.receive([part], peer=peer, of=self._of_parts, owners=[part], then=self._part_came)
            for peer, part in theirs.items()
        ]
        self._passages += [
            host.receive([self._parts[peer]], peer=peer, of=self._of_sums, then=self._sum_came) for peer in self._others
        ]

    def send_parts(self) -> None:
        """Send the others their parts."""
        for peer in self._others:
            self._passages.append(self._host.send([self._parts[peer]], peer=peer, of=self._of_parts))

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long for the sum.

        Raises:
            RuntimeError: if a connection is gone.
        """
        return self._host.wait(self._has_ended, timeout_s)

    def landed(self) -> bool:
        """Return whether the sum is there."""
        return all(passage.landed() for passage in self._passages)

    def _has_ended(self) -> bool:
        return all(passage.has_ended() for passage in self._passages)

    def _part_came(self) -> None:
        self._parts_to_come -= 1
        if self._parts_to_come:
            return
        mine = self._parts[self._rank]
        with torch.no_grad():
            for part in self._theirs.values():
                mine.add_(part)
        self._theirs.clear()
        for peer in self._others:
            self._passages.append(self._host.send([mine], peer=peer, of=self._of_sums))

    def _sum_came(self) -> None:
        self._sums_to_come -= 1
        if not self._sums_to_come:
            self._over(self)
