"""Sums and broadcasts of ranks on one host, as messages between all of them (`same_host.py`), without gloo's threads.

Of what is small every member sends its tensor to every other, and adds all of them in the order of ranks, so all have
the same bits: less time than the rounds of a ring. Large sums go by parts (`large_sums.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.distributed as dist

from lightning_pipe.runtime.transport.large_sums import LargeSums, channels_of
from lightning_pipe.runtime.transport.protocol import Group
from lightning_pipe.runtime.transport.same_host import Passage, Purpose, SameHost
from lightning_pipe.runtime.waiting import Handle

_SMALL_BYTES = 2**20  # that a member sends to all others together
_MOST_MEMBERS = 8  # each has channels to every other


class HostSums:
    """Sum and broadcast within groups whose members share a host.

    Args:
        rank: this rank.
        host: its connections.
    """

    def __init__(self, rank: int, host: SameHost) -> None:
        self._rank, self._host = rank, host
        self._groups: set[Group] = set()  # whose members all reach each other
        self._large = LargeSums(rank, host)

    def open(self, groups: Sequence[Group], *, world: dist.ProcessGroup) -> None:
        """Connect the members of groups; on all ranks together."""
        for group in groups:
            if group not in self._groups and len(group) <= _MOST_MEMBERS:
                pairs = tuple(itertools.permutations(group, 2))
                if all(
                    self._host.open(pairs, world=world, of=purpose) for purpose in (_of(group), *channels_of(group))
                ):
                    self._groups.add(group)

    def sums(self, tensor: torch.Tensor, group: Group) -> bool:
        """Return whether a tensor is summed here, which all members answer alike."""
        return group in self._groups and tensor.device.type == "cpu"

    def broadcasts(self, tensor: torch.Tensor, group: Group) -> bool:
        """Return whether a tensor is broadcast here, which all members answer alike."""
        return self.sums(tensor, group) and _is_small(tensor, group)

    def all_reduce(self, tensor: torch.Tensor, *, group: Group) -> Handle:
        """Post the sum of a contiguous tensor, in place."""
        if not _is_small(tensor, group):
            return self._large.begin(tensor, group)
        departures = self._sent(tensor, group)
        parts = {peer: torch.empty_like(tensor) for peer in self._others(group)}
        arrivals = [self._host.receive([part], peer=peer, of=_of(group)) for peer, part in parts.items()]
        return _Sum(tensor, {**parts, self._rank: tensor}, _All((*arrivals, *departures)))

    def broadcast(self, tensor: torch.Tensor, *, source: int, group: Group) -> Handle:
        """Post the copying of the source's tensor into those of the other members."""
        if self._rank == source:
            return _All(self._sent(tensor, group))
        return self._host.receive([tensor], peer=source, of=_of(group))

    def close(self) -> None:
        """Forget the groups."""
        self._groups.clear()
        self._large.close()

    def _sent(self, tensor: torch.Tensor, group: Group) -> tuple[Passage, ...]:
        return tuple(self._host.send([tensor], peer=peer, of=_of(group)) for peer in self._others(group))

    def _others(self, group: Group) -> list[int]:
        return [peer for peer in group if peer != self._rank]


def _of(group: Group) -> Purpose:
    """Return what the channels are for that carry small sums and broadcasts."""
    return "small", group


def _is_small(tensor: torch.Tensor, group: Group) -> bool:
    return tensor.nbytes * (len(group) - 1) <= _SMALL_BYTES


@dataclass(frozen=True)
class _All:
    """Messages that are waited for together."""

    handles: tuple[Passage, ...]

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long for all."""
        end = time.monotonic() + timeout_s
        return all(handle.wait(max(0.0, end - time.monotonic())) for handle in self.handles)

    def landed(self) -> bool:
        """Return whether all are over."""
        return all(handle.landed() for handle in self.handles)


@dataclass
class _Sum:
    """A sum under way: `parts` by rank, of which one is `total`, where it goes."""

    total: torch.Tensor
    parts: dict[int, torch.Tensor]
    messages: _All

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long for all parts, and add them."""
        if not self.messages.wait(timeout_s):
            return False
        if self.parts:
            with torch.no_grad():
                self.total.copy_(reduce(torch.add, (self.parts[rank] for rank in sorted(self.parts))))
            self.parts.clear()
        return True

    def landed(self) -> bool:
        """Return whether the sum is there."""
        return not self.parts
