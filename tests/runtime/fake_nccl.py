"""A fake of torch.distributed's NCCL groups and of torch.cuda's streams, for ranks of one thread; no data moves.

Every rank goes through its calls alone, since nothing waits. What is called is written down: by group, so that both
ends can be compared, and by rank, with whatever else a test notes there.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

COMMUNICATOR_BYTES = 100 << 20
DEVICE_BYTES = 80 << 30


@dataclass
class FakeGroup:
    """A process group as all ranks see it.

    Attributes:
        ranks: its members.
        calls: operations by rank.
        aborted, destroyed: the ranks that have done that.
        fails: whether its abort raises.
    """

    ranks: tuple[int, ...]
    calls: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    aborted: set[int] = field(default_factory=set)
    destroyed: set[int] = field(default_factory=set)
    fails: bool = False


@dataclass(frozen=True)
class FakeMember:
    """A process group on one rank."""

    group: FakeGroup
    rank: int

    def abort(self) -> None:
        self.group.aborted.add(self.rank)
        if self.group.fails:
            raise RuntimeError("NCCL error: unhandled system error")


class FakeStream:
    """A stream that remembers which events it waits for."""

    def __init__(self, device: object = None) -> None:
        self.awaited: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.awaited.append(event)


class FakeEvent:
    """An event that remembers where it was recorded: its stream, and the length of the rank's log."""

    fake: FakeNccl

    def __init__(self, **options: object) -> None:
        self.stream: FakeStream | None = None
        self.position = -1

    def record(self, stream: FakeStream | None = None) -> None:
        self.stream = stream or self.fake.stream
        self.position = len(self.fake.log[self.fake.rank])

    def synchronize(self) -> None:
        self.fake.host_waits[self.fake.rank] += 1

    def query(self) -> bool:
        return True


@dataclass(frozen=True)
class FakeWork:
    """An operation that is over at once."""

    fake: FakeNccl

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return self.fake.completes


class FakeNccl:
    """All ranks and groups.

    Attributes:
        rank: whose calls come now.
        groups: in the order of their creation.
        log: by rank, operations and what a test adds.
        launches: by rank, the receives: their stream and the events that it had waited for.
        host_waits: by rank, how often the host has waited for the device.
        completes: what works say of their end.
        on_call: told of every operation.
        handling: what the environment has said of torch's watchdog when groups were made.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.groups: list[FakeGroup] = []
        self.log: dict[int, list[str]] = defaultdict(list)
        self.launches: dict[int, list[tuple[FakeStream, list[FakeEvent]]]] = defaultdict(list)
        self.host_waits: dict[int, int] = defaultdict(int)
        self.completes = True
        self.on_call: Callable[[FakeGroup, str], None] = lambda group, call: None
        self.handling: set[str | None] = set()
        self.stream = FakeStream()
        self._created: dict[int, int] = defaultdict(int)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace torch's functions until the end of the test."""
        FakeEvent.fake = self
        for name in ("new_group", "destroy_process_group", "isend", "irecv", "all_reduce", "broadcast"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "stream", self.on_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stream)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (self._free(), DEVICE_BYTES))

    def left(self, rank: int) -> list[tuple[int, ...]]:
        """Return the members of the groups that a rank has not destroyed."""
        return [group.ranks for group in self.groups if rank in group.ranks and rank not in group.destroyed]

    def new_group(self, ranks: list[int], *, timeout: object, backend: str) -> object:
        number = self._created[self.rank]
        self._created[self.rank] += 1
        if number == len(self.groups):
            self.groups.append(FakeGroup(tuple(sorted(ranks))))
        self.handling.add(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))
        assert self.groups[number].ranks == tuple(sorted(ranks)), "ranks create groups in different orders"
        return FakeMember(self.groups[number], self.rank)

    def destroy_process_group(self, member: FakeMember) -> None:
        if self.rank in member.group.aborted:
            raise RuntimeError("NCCL communicator was aborted")
        member.group.destroyed.add(self.rank)

    def isend(self, tensor: torch.Tensor, *, dst: int, group: FakeMember) -> FakeWork:
        return self._called(group, f"{self.rank}>{dst}")

    def irecv(self, tensor: torch.Tensor, *, src: int, group: FakeMember) -> FakeWork:
        self.launches[self.rank].append((self.stream, [*self.stream.awaited]))
        return self._called(group, f"{src}>{self.rank}")

    def all_reduce(self, tensor: torch.Tensor, *, group: FakeMember, **options: Any) -> FakeWork:
        return self._called(group, f"sum of {tensor.numel()}")

    def broadcast(self, tensor: torch.Tensor, source: int, *, group: FakeMember, **options: Any) -> FakeWork:
        return self._called(group, f"{tensor.numel()} from {source}")

    @contextmanager
    def on_stream(self, stream: FakeStream) -> Iterator[None]:
        outer, self.stream = self.stream, stream
        yield
        self.stream = outer

    def _called(self, member: FakeMember, call: str) -> FakeWork:
        assert member.rank == self.rank and self.rank not in member.group.destroyed
        member.group.calls[self.rank].append(call)
        self.log[self.rank].append(call)
        self.on_call(member.group, call)
        return FakeWork(self)

    def _free(self) -> int:
        used = sum(bool(group.calls[self.rank]) for group in self.groups if self.rank not in group.destroyed)
        return DEVICE_BYTES - used * COMMUNICATOR_BYTES
