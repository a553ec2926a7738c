"""Link probe: messages and all-reduces between ranks, timed on the transport that will carry them.

    rank a                      rank b            a trip of n bytes from a to b; a's clock alone counts
      | -- header: n ----------> |
      | <---------- ready ------ |                b has a buffer and waits
    t0| == n bytes ============> |
    t1| <---------- tiny ------- |                t1 - t0 = there (n bytes) + back (a tiny message)

The trip of a tiny message is twice the latency; what larger messages take beyond it is their bytes over the bandwidth
of this direction. On CPUs the sender computes meanwhile, as it does in training: there messages need the cores that
computes need. How long the sender is kept by posting a message is measured by the way.

A reduction is timed by all its members, whose mean counts, from gradients that lie where backwards left them: they are
copied into one piece before they are summed, as `gradients` does (without the copy, sums over three ranks of
one host were found a quarter too short), and caches hold something else, as after a backward (with what was summed just
before in them, sums of two ranks seemed to take two thirds of what they take in training). How much of that its members
are kept from computing shows when one is begun and only waited for when it could be over: a device or gloo's threads
have done it by then, the rank's own thread has not. Nothing that shares a host is measured at the same time: network
cards and buses would be shared. Every wait goes through the caller's `wait`.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from statistics import median
from typing import Protocol, TypeAlias

import torch

from lightning_pipe.core.cluster import Link, PairLink, Reduction
from lightning_pipe.core.sharding import PIECE_BYTES
from lightning_pipe.profiler.network.alpha_beta import fit_line, fit_two_lines

EVERY_PAIR_UP_TO = 8  # ranks, or hosts
_HEADER = torch.int64
_GRADIENT_BYTES = 2**17  # of a parameter, as those of layers of a few hundred units
_CACHES_BYTES = 64 * 2**20  # that those of a host hold at most
_BUSY_BYTES = 8 * 2**20  # of sums in which it is measured how busy members are
_BUSY_SUMS = 5
_PAUSE = 3.0  # of the seconds of a sum: what goes on by itself is over by then
_CHECKED_LINKS = 4  # of each kind
_CHECKED_BYTES, _CHECKED_TRIPS = 2**20, 5
_CHANGED = 2.0  # a link has changed if its fastest trip takes so many times as long or short as was measured


class ProbeHandle(Protocol):
    """A transfer or collective under way."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long; return whether work that is queued from now on may use the data."""
        ...

    def landed(self) -> bool:
        """Return whether the data is really there."""
        ...


class ProbeTransport(Protocol):
    """What carries the messages of a pipeline, as far as it is needed here."""

    rank: int

    def open(self, *, channels: Sequence[tuple[int, int]], groups: Sequence[tuple[int, ...]]) -> None:
        """Create what is missing; on all ranks with the same arguments."""
        ...

    def send(self, tensors: Sequence[torch.Tensor], *, peer: int) -> ProbeHandle:
        """Post the sending of tensors."""
        ...

    def receive(
        self, buffers: Sequence[torch.Tensor], *, peer: int, owners: Sequence[torch.Tensor] = ()
    ) -> ProbeHandle:
        """Post the receiving of tensors."""
        ...

    def all_reduce(self, tensor: torch.Tensor, *, group: tuple[int, ...]) -> ProbeHandle:
        """Post a sum, in place."""
        ...

    def trim(self) -> None:
        """Give up memory that is kept for messages to come; nothing is under way."""
        ...


WaitFor: TypeAlias = Callable[[ProbeHandle, str], None]  # waits for a handle that an error calls by these words


@dataclass(frozen=True)
class LinkFacts:
    """What was measured, the same on all ranks.

    Attributes:
        links: measured pairs, in both directions.
        reductions: measured groups.
        post_s, post_s_per_byte: for how long posting a message keeps its sender, at most over the pairs.
        sum_busy_share: share of the seconds of reductions in which they keep their ranks, at most over the groups.
    """

    links: tuple[PairLink, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    post_s: float = 0.0
    post_s_per_byte: float = 0.0
    sum_busy_share: float = 0.0


def probe_links(transport: ProbeTransport, *, hosts: Sequence[int], device: torch.device, wait: WaitFor) -> LinkFacts:
    """Measure links and all-reduces; called on all ranks together, with nothing under way.

    Opens the channels and groups that it needs. Takes about 0.1 s per pair and group; on one rank nothing.

    Args:
        transport: carries the messages.
        hosts: index of the host of every rank.
        device: where messages live; the device of this rank.
        wait: waits for a handle, with the deadline and the error of the caller.

    Returns:
        What `pairs_to_measure` and `groups_to_measure` chose, measured.
    """
    pairs, groups = pairs_to_measure(hosts), groups_to_measure(hosts)
    if not pairs:
        return LinkFacts()
    open_for_probe(transport, hosts=hosts)
    everyone = tuple(range(len(hosts)))
    probe = _Probe(transport, device=device, wait=wait, everyone=everyone)
    of_pairs = probe.measure(pairs, hosts, probe.pair)
    of_groups = probe.measure(groups, hosts, probe.reduction)
    transport.trim()  # messages of training are smaller, and go along few of these channels
    return LinkFacts(
        tuple(PairLink(a, b, Link(m.fixed_s / 2, m.bytes_per_s)) for (a, b), m in zip(pairs, of_pairs, strict=True)),
        tuple(Reduction(group, m.fixed_s, m.bytes_per_s, m.small) for group, m in zip(groups, of_groups, strict=True)),
        post_s=max(m.post_s for m in of_pairs),
        post_s_per_byte=max(m.post_s_per_byte for m in of_pairs),
        sum_busy_share=max(m.busy_share for m in of_groups),
    )


def links_hold(
    transport: ProbeTransport, links: Sequence[PairLink], *, hosts: Sequence[int], device: torch.device, wait: WaitFor
) -> bool:
    """Return on all ranks whether links are what was measured of them before, by a few messages along some of them.

    Called on all ranks together, after `open_for_check`, with nothing under way. Takes a few milliseconds per link.

    Args:
        transport: carries the messages.
        links: as measured; none of one rank.
        hosts: index of the host of every rank.
        device: where messages live; the device of this rank.
        wait: waits for a handle, with the deadline and the error of the caller.
    """
    if not links:
        return True
    probe = _Probe(transport, device=device, wait=wait, everyone=tuple(range(len(hosts))))
    changed = torch.zeros(1, device=device)
    for link in links_to_check(links, hosts):
        changed += probe.has_changed(link)
        probe.meet()
    probe.add_up(changed)
    transport.trim()
    return not changed.item()


def links_to_check(links: Sequence[PairLink], hosts: Sequence[int]) -> tuple[PairLink, ...]:
    """Return which measured links tell whether links have changed: a few between hosts, and a few inside of hosts.

    Args:
        links: as measured.
        hosts: index of the host of every rank.
    """
    forwards = [link for link in links if link.sender < link.receiver]
    nearest = sorted(forwards, key=lambda link: link.receiver - link.sender)
    inside = [link for link in nearest if hosts[link.sender] == hosts[link.receiver]]
    across = [link for link in nearest if hosts[link.sender] != hosts[link.receiver]]
    return (*across[:_CHECKED_LINKS], *inside[:_CHECKED_LINKS])


def open_for_check(transport: ProbeTransport, links: Sequence[PairLink], *, hosts: Sequence[int]) -> None:
    """Open what `links_hold` uses; called on all ranks together, which may wait for each other in it."""
    pairs = [(link.sender, link.receiver) for link in links_to_check(links, hosts)]
    both_ways = sorted({channel for a, b in pairs for channel in ((a, b), (b, a))})
    transport.open(channels=both_ways, groups=[tuple(range(len(hosts)))] if pairs else [])


def open_for_probe(transport: ProbeTransport, *, hosts: Sequence[int]) -> None:
    """Open what `probe_links` uses; called on all ranks together, which may wait for each other in it."""
    both_ways = sorted({channel for a, b in pairs_to_measure(hosts) for channel in ((a, b), (b, a))})
    transport.open(channels=both_ways, groups=[tuple(range(len(hosts))), *groups_to_measure(hosts)])


def pairs_to_measure(hosts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return which directed pairs of ranks are measured.

    All pairs of few ranks. Otherwise one per kind of link, in both directions: the first two ranks of every host; and
    the first ranks of all pairs of hosts if hosts are few, else of every host and the next.

    Args:
        hosts: index of the host of every rank.
    """
    ranks = range(len(hosts))
    if len(ranks) <= EVERY_PAIR_UP_TO:
        return tuple((a, b) for a in ranks for b in ranks if a != b)
    members = _members(hosts)
    first = [of_host[0] for of_host in members]
    inside = [(of_host[0], of_host[1]) for of_host in members if len(of_host) > 1]
    if len(first) <= EVERY_PAIR_UP_TO:
        across = [(a, b) for i, a in enumerate(first) for b in first[i + 1 :]]
    else:
        across = [(a, first[(i + 1) % len(first)]) for i, a in enumerate(first)]
    return tuple(direction for a, b in (*inside, *across) for direction in ((a, b), (b, a)))


def groups_to_measure(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return which groups of ranks have their all-reduce measured.

    Powers of two (and all) of the ranks of every host; of several hosts the same, with one rank each and with all.

    Args:
        hosts: index of the host of every rank.
    """
    members = _members(hosts)
    inside = [tuple(of_host[:count]) for of_host in members for count in _sizes(len(of_host))]
    across = [
        tuple(sorted(rank for of_host in members[:count] for rank in of_host[:ranks]))
        for count in _sizes(len(members))
        for ranks in (1, len(hosts))
    ]
    return tuple(dict.fromkeys((*inside, *across)))


def rounds(units: Sequence[tuple[int, ...]], hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return rounds of units (pairs or groups of ranks, by index) that can be measured together: none share a host."""
    busy: list[set[int]] = []
    found: list[list[int]] = []
    for index, unit in enumerate(units):
        needed = {hosts[rank] for rank in unit}
        free = next((r for r, taken in enumerate(busy) if not needed & taken), len(busy))
        if free == len(busy):
            busy.append(set())
            found.append([])
        busy[free] |= needed
        found[free].append(index)
    return tuple(tuple(indices) for indices in found)


def _members(hosts: Sequence[int]) -> list[list[int]]:
    return [[rank for rank, of_rank in enumerate(hosts) if of_rank == host] for host in sorted(set(hosts))]


def _sizes(count: int) -> Iterator[int]:
    """Yield the powers of two from 2 below a number, and the number."""
    size = 2
    while size < count:
        yield size
        size *= 2
    if count > 1:
        yield count


@dataclass(frozen=True)
class _Landed:
    """A handle that is done when another one has really landed. It looks without a pause: it is being timed."""

    handle: ProbeHandle

    def wait(self, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s
        if not self.handle.wait(timeout_s):
            return False
        while not self.handle.landed():
            if time.monotonic() > end:
                return False
        return True

    def landed(self) -> bool:
        return self.handle.landed()


@dataclass(frozen=True)
class _Measured:
    """What one rank tells the others of a pair or group, in numbers."""

    fixed_s: float
    bytes_per_s: float
    post_s: float = 0.0
    post_s_per_byte: float = 0.0
    busy_share: float = 0.0
    small_fixed_s: float = 0.0
    small_bytes_per_s: float = 0.0

    @property
    def small(self) -> Link | None:
        """Return the line of few bytes, if there is one."""
        return Link(self.small_fixed_s, self.small_bytes_per_s) if self.small_bytes_per_s else None


class _Probe:
    """One rank's part of the measurements."""

    def __init__(
        self, transport: ProbeTransport, *, device: torch.device, wait: WaitFor, everyone: tuple[int, ...]
    ) -> None:
        self._transport, self._device, self._wait, self._everyone = transport, device, wait, everyone
        self._token = torch.zeros(1, dtype=torch.uint8, device=device)
        self._buffer = torch.zeros(0, dtype=torch.uint8, device=device)
        self._other = torch.zeros(0, dtype=torch.uint8)
        self._posted: dict[int, list[float]] = defaultdict(list)  # bytes -> seconds that posting took

    def measure(
        self, units: Sequence[tuple[int, ...]], hosts: Sequence[int], one: Callable[[tuple[int, ...]], _Measured | None]
    ) -> list[_Measured]:
        """Return what was measured of all units, on all ranks; `one` measures a unit and tells one of its ranks."""
        table = torch.zeros(len(units), len(fields(_Measured)), dtype=torch.float64, device=self._device)
        for together in rounds(units, hosts):
            for index in together:
                measured = one(units[index]) if self._transport.rank in units[index] else None
                if measured is not None:
                    table[index] = torch.tensor(astuple(measured), dtype=torch.float64)
            self.meet()
        self.add_up(table)
        return [_Measured(*row) for row in table.tolist()]

    def has_changed(self, link: PairLink) -> bool:
        """Return, on its sender, whether messages along a link take another time than was measured."""
        if self._transport.rank == link.receiver:
            self._answer(link.sender)
        if self._transport.rank != link.sender:
            return False
        with computing(self._device):
            seconds = min(self._trip(link.receiver, _CHECKED_BYTES) for _ in range(_CHECKED_TRIPS))
        self._send(torch.zeros(1, dtype=_HEADER, device=self._device), link.receiver)
        expected = link.link.seconds(_CHECKED_BYTES) + link.link.latency_s
        return not 1 / _CHANGED < seconds / expected < _CHANGED

    def meet(self) -> None:
        """Wait for all ranks."""
        self.add_up(torch.zeros(1, device=self._device))

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place."""
        self._sum(tensor, self._everyone, "the other ranks, which measure links")

    def pair(self, pair: tuple[int, ...]) -> _Measured | None:
        """Measure from the first to the second; the first knows."""
        sender, receiver = pair
        if self._transport.rank == receiver:
            self._answer(sender)
            return None
        self._posted.clear()
        with computing(self._device):
            line = fit_line(lambda count: self._trip(receiver, count))
        self._send(torch.zeros(1, dtype=_HEADER, device=self._device), receiver)
        least, most = min(self._posted), max(self._posted)
        post_s, whole_s = median(self._posted[least]), median(self._posted[most])
        return _Measured(line.fixed_s, line.bytes_per_s, post_s, max(0.0, whole_s - post_s) / max(1, most - least))

    def reduction(self, group: tuple[int, ...]) -> _Measured | None:
        """Measure the all-reduce of a group; all members know, the first tells."""
        many, few = fit_two_lines(lambda count: self._reduce(group, count), most_bytes=PIECE_BYTES)
        busy_share = self._busy_share(group)
        if self._transport.rank != group[0]:
            return None
        small = astuple(few) if few is not None else (0.0, 0.0)
        return _Measured(many.fixed_s, many.bytes_per_s, 0.0, 0.0, busy_share, *small)

    def _trip(self, receiver: int, count: int) -> float:
        """Send this many bytes, and return the seconds until the answer has come."""
        message = self._bytes(count)
        self._send(torch.full((1,), count, dtype=_HEADER, device=self._device), receiver)
        self._receive(self._token, receiver)
        answer = self._transport.receive([self._token], peer=receiver)
        start = time.perf_counter()
        posted = self._transport.send([message], peer=receiver)
        self._posted[count].append(time.perf_counter() - start)
        self._finish(posted, f"a measured message to rank {receiver}")
        self._finish(answer, f"the answer of rank {receiver} to a measured message")
        return time.perf_counter() - start

    def _answer(self, sender: int) -> None:
        """Receive what the sender announces, until it announces nothing more."""
        header = torch.zeros(1, dtype=_HEADER, device=self._device)
        while True:
            self._receive(header, sender)
            count = int(header)
            if not count:
                return
            fresh = [torch.empty(count, dtype=torch.uint8, device=self._device)]  # as a stage receives
            message = self._transport.receive(fresh, peer=sender, owners=fresh)
            self._send(self._token, sender)
            self._finish(message, f"a measured message from rank {sender}")
            self._send(self._token, sender)

    def _reduce(self, group: tuple[int, ...], count: int, *, pause_s: float = 0.0) -> float:
        """Sum this many bytes of gradients, and return the seconds that the members took on average.

        Args:
            group: the members.
            count: bytes.
            pause_s: how long they do something else before they wait for the sum, which does not count.
        """
        gradients = self._bytes(count).view(torch.float32).split(_GRADIENT_BYTES // 4)
        self._forget(count)
        start = time.perf_counter()
        handle = self._transport.all_reduce(torch.cat(gradients), group=group)
        paused = time.perf_counter()
        time.sleep(pause_s)
        paused = time.perf_counter() - paused
        self._finish(handle, f"a measured sum among ranks {list(group)}")
        spent = torch.tensor([time.perf_counter() - start - paused], dtype=torch.float64, device=self._device)
        self._sum(spent, group, f"the times of ranks {list(group)}")  # also lets all begin the next one together
        return float(spent) / len(group)

    def _busy_share(self, group: tuple[int, ...]) -> float:
        """Return in what share of its seconds a sum keeps its members from computing, on average; 0 on devices."""
        if self._device.type == "cuda":
            return 0.0
        whole_s = median(self._reduce(group, _BUSY_BYTES) for _ in range(_BUSY_SUMS))
        kept_s = median(self._reduce(group, _BUSY_BYTES, pause_s=_PAUSE * whole_s) for _ in range(_BUSY_SUMS))
        return min(1.0, kept_s / whole_s)

    def _forget(self, count: int) -> None:
        """Let caches of the host hold something else than what is summed, as they do after a backward."""
        if self._device.type == "cpu" and count >= _GRADIENT_BYTES:
            if not self._other.numel():
                self._other = torch.zeros(_CACHES_BYTES, dtype=torch.uint8)
            self._other.add_(1)

    def _bytes(self, count: int) -> torch.Tensor:
        """Return this many bytes of memory that has been touched."""
        if self._buffer.numel() < count:
            self._buffer = torch.zeros(count, dtype=torch.uint8, device=self._device)
        return self._buffer[:count]

    def _send(self, tensor: torch.Tensor, peer: int) -> None:
        self._finish(self._transport.send([tensor], peer=peer), f"rank {peer} to take a measured message")

    def _receive(self, buffer: torch.Tensor, peer: int) -> None:
        self._finish(self._transport.receive([buffer], peer=peer), f"a measured message from rank {peer}")

    def _sum(self, tensor: torch.Tensor, group: tuple[int, ...], what: str) -> None:
        self._finish(self._transport.all_reduce(tensor, group=group), what)

    def _finish(self, handle: ProbeHandle, what: str) -> None:
        self._wait(_Landed(handle), what)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # only copies of what has landed: nothing that waits for a peer


@contextmanager
def computing(device: torch.device) -> Iterator[None]:
    """Let a thread of this process multiply matrices, if it computes on cores that messages need too."""
    if device.type == "cuda":
        yield
        return
    stop, threads = threading.Event(), torch.get_num_threads()
    matrix = torch.zeros(_ROWS, _ROWS, device=device)

    def compute() -> None:
        torch.set_num_threads(threads)  # a new thread has those of the environment, and would take others' cores
        while not stop.is_set():
            torch.mm(matrix, matrix)

    thread = threading.Thread(target=compute, name="computing while a link is measured", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


_ROWS = 256  # of the matrices; a product takes about a millisecond, as operations of a stage do
