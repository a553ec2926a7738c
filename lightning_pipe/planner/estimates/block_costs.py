"""Costs of stages on blocks of a row of devices, for all cut positions at once as in `StageCostTable`.

Planners that fix the order of the devices give every stage a block of it. Devices are taken in units: one by one, or,
where there are many, by equal parts of hosts. A block of replicas with different speeds shares samples in proportion
(`outline.weights_of`), so each has the same seconds: those of a mean share at the mean speed.

Exchanges and sums are those of `cost.comm`, worked out once for blocks that look alike: an exchange is a line through
its seconds for no bytes and for many, a sum of gradients is read between a few numbers of bytes (it is the cheaper of
two lines). Left out: shares of unequal size in exchanges; that samples are whole where replicas have different speeds.

Legend: a, b bounds; n samples of a micro-batch; a block is (first unit, number of units).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.cluster import Cluster
from lightning_pipe.core.plan import microbatch_sizes
from lightning_pipe.cost.comm import all_reduce_of, exchange_of
from lightning_pipe.planner.candidates.candidate import Candidate, never_growing
from lightning_pipe.planner.estimates.recurrence import Estimator
from lightning_pipe.planner.estimates.stage_costs import Matrix, StageCostTable

Vector: TypeAlias = NDArray[np.float64]  # over bounds
Look: TypeAlias = tuple[object, ...]

_MANY_BYTES = 1e9  # a line through the seconds of none and of so many bytes
_SUMMED = (0.0, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e11)  # bytes of sums of gradients between which seconds are read
_NO_LIMIT = 1 << 30
_PARTS = 16  # steps from the depths that are wanted to the least
_ALL_DEGREES = 16  # units up to which every number of them may make a stage
_NEAR_ENDS = 8  # of more units: so many from either end, multiples of a host's, divisors, and powers of two


@dataclass(frozen=True)
class LinkLine:
    """Seconds of a message of some bytes: `fixed_s + bytes * s_per_byte`."""

    fixed_s: float
    s_per_byte: float


class DeviceRow:
    """Devices in a row, of which stages take blocks.

    Args:
        cluster: devices and links.
        order: all ranks.
        most: units at most; of more devices several of one host make a unit, and of more hosts several hosts.
    """

    def __init__(self, cluster: Cluster, order: Sequence[int], *, most: int) -> None:
        self.cluster = cluster
        self.units = tuple(_units(cluster, order, most))
        self._ends = [0, *itertools.accumulate(len(unit) for unit in self.units)]
        self._order = tuple(itertools.chain.from_iterable(self.units))
        speeds = [cluster.device(rank).speed for rank in self._order]
        self._speeds = np.cumsum([0.0, *speeds])
        self._changes = np.cumsum([0, 0, *(u != v for u, v in itertools.pairwise(speeds))])
        runs = [list(run) for _, run in itertools.groupby(range(len(self._order)), lambda i: self._host(i))]
        self._starts = [run[0] for run in runs]
        self._kinds = self._kinds_of(runs)
        self._exchanges: dict[tuple[int, int, int], tuple[LinkLine, LinkLine]] = {}
        self._lines: dict[Look, tuple[LinkLine, LinkLine]] = {}
        self._sums: dict[Look, tuple[float, ...]] = {}

    def _host(self, place: int) -> int:
        return self.cluster.host_of(self._order[place])

    def _kinds_of(self, runs: Sequence[Sequence[int]]) -> tuple[object, ...]:
        """Return what decides the links of every run of devices of one host; with measured links, which host it is."""
        if self.cluster.links or self.cluster.reductions:
            return tuple(range(len(runs)))
        hosts = [self.cluster.hosts[self._host(run[0])] for run in runs]
        looks = [(host.devices, host.inside, host.network) for host in hosts]
        number = {look: i for i, look in enumerate(dict.fromkeys(looks))}
        return tuple(number[look] for look in looks)

    def __len__(self) -> int:
        """Count the units."""
        return len(self.units)

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """Return the numbers of units that may make a stage, rising."""
        count = len(self.units)
        if count <= _ALL_DEGREES:
            return tuple(range(1, count + 1))
        ends = {*range(1, _NEAR_ENDS + 1), *range(count - _NEAR_ENDS + 1, count + 1)}
        divisors = {d for d in range(1, count + 1) if count % d == 0}
        powers = {2**k for k in range(count.bit_length())}
        host = len(self.cluster.hosts[0].devices)
        of_hosts = set(range(host, count + 1, host)) if len(self.units[0]) == 1 and host > 1 else set()
        return tuple(sorted(d for d in ends | divisors | powers | of_hosts if d <= count))

    def ranks(self, first: int, count: int) -> tuple[int, ...]:
        """Return the ranks of a block, in the order of the row."""
        return self._order[self._ends[first] : self._ends[first + count]]

    def devices(self, first: int, count: int) -> int:
        """Count the devices of a block."""
        return self._ends[first + count] - self._ends[first]

    def speed(self, first: int, count: int) -> float:
        """Return the speeds of the devices of a block together."""
        return float(self._speeds[self._ends[first + count]] - self._speeds[self._ends[first]])

    def is_even(self, first: int, count: int) -> bool:
        """Return whether all devices of a block are equally fast."""
        return bool(self._changes[self._ends[first] + 1] == self._changes[self._ends[first + count]])

    def memory_bytes(self, first: int, count: int) -> int:
        """Return the memory of the smallest device of a block."""
        return self._least_memory[first][count - 1]

    @cached_property
    def _least_memory(self) -> list[list[int]]:
        memory = [min(self.cluster.device(rank).memory_bytes for rank in unit) for unit in self.units]
        return [list(itertools.accumulate(memory[first:], min)) for first in range(len(memory))]

    def exchange(self, first: int, count: int, then: int) -> tuple[LinkLine, LinkLine]:
        """Return the seconds of a micro-batch's bytes from a block to the `then` units behind it, and of those back."""
        place = (first, count, then)
        if place not in self._exchanges:
            look = (self._look(first, count), self._look(first + count, then), self._meet_in_a_host(first + count))
            if look not in self._lines:
                self._lines[look] = self._there_and_back(*place)
            self._exchanges[place] = self._lines[look]
        return self._exchanges[place]

    def _there_and_back(self, first: int, count: int, then: int) -> tuple[LinkLine, LinkLine]:
        pairs = list(_pairs(self.ranks(first, count), self.ranks(first + count, then)))
        there = self._line(pairs)
        if not self.cluster.links:  # what the hosts say of links is true of both directions
            return there, there
        return there, self._line([(receiver, sender) for sender, receiver in pairs])

    def _line(self, pairs: Sequence[tuple[int, int]]) -> LinkLine:
        exchange = exchange_of(self.cluster, pairs)
        none, many = exchange.seconds(0.0), exchange.seconds(_MANY_BYTES)
        return LinkLine(none, (many - none) / _MANY_BYTES)

    def sums(self, first: int, count: int) -> tuple[float, ...]:
        """Return the seconds of sums of a few numbers of bytes among the devices of a block; see `read_sums`."""
        look = self._look(first, count)
        if look not in self._sums:
            ranks = sorted(self.ranks(first, count))
            self._sums[look] = tuple(map(all_reduce_of(self.cluster, ranks).seconds, _SUMMED))
        return self._sums[look]

    def _look(self, first: int, count: int) -> Look:
        """Return what decides the links of a block: the kinds of its hosts, and how much of the outer ones it has."""
        begin, end = self._ends[first], self._ends[first + count]
        left, right = (bisect.bisect_right(self._starts, place) - 1 for place in (begin, end - 1))
        inside = begin - self._starts[left] if self._depends_on_place else 0
        return self._kinds[left : right + 1], begin - self._starts[left] if left < right else inside, end - begin

    @cached_property
    def _depends_on_place(self) -> bool:
        """Return whether devices of one host differ in their links."""
        return bool(self.cluster.links or self.cluster.reductions)

    def _meet_in_a_host(self, border: int) -> bool:
        place = self._ends[border]
        return self._host(place - 1) == self._host(place)


def read_sums(table: Sequence[float], amounts: Matrix) -> Matrix:
    """Return the seconds of sums of so many bytes from those of a few numbers of bytes."""
    return np.asarray(np.where(amounts > 0, np.interp(amounts, _SUMMED, table), 0.0))


def _units(cluster: Cluster, order: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Yield parts of hosts, equal if that is possible, the smallest of which there are not too many; or whole hosts."""
    hosts = [tuple(run) for _, run in itertools.groupby(order, key=cluster.host_of)]
    largest = max(map(len, hosts))
    sizes = [size for size in range(1, largest) if all(len(host) % size == 0 for host in hosts)]
    size = next((size for size in sizes if len(order) // size <= most), largest)
    parts = [host[begin : begin + size] for host in hosts for begin in range(0, len(host), size)]
    together = math.ceil(len(parts) / most)
    for begin in range(0, len(parts), together):
        yield tuple(itertools.chain.from_iterable(parts[begin : begin + together]))


def _pairs(senders: Sequence[int], receivers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of an exchange between replicas with equal shares, as `cost.comm.exchange_pairs` does, quickly.

    Of s * r parts sender i has those from i * r on, receiver j those from j * s on.
    """
    s, r = len(senders), len(receivers)
    for part in sorted({*range(0, s * r, r), *range(0, s * r, s)}):
        yield senders[part // r], receivers[part // s]


@dataclass(frozen=True)
class RowSeconds:
    """Seconds of stages and links for one micro-batch, there and back, and of every stage's sum of gradients."""

    loads: tuple[float, ...]
    links: tuple[float, ...]
    sums: tuple[float, ...]


class BlockCosts:
    """Costs of stages on blocks of a row, for micro-batches of n samples.

    Args:
        segments: costs of all stages on one device.
        row: the devices.
        samples: samples of a micro-batch.
    """

    def __init__(self, segments: StageCostTable, row: DeviceRow, *, samples: float) -> None:
        self.segments, self.row, self.samples = segments, row, samples
        self._problem = segments.problem
        self._shares: dict[tuple[int, bool], tuple[Matrix, Matrix, Matrix]] = {}
        self._made: dict[tuple[object, ...], Matrix] = {}
        self._kinds: dict[object, int] = {}
        self._kind_of: dict[tuple[int, int], int] = {}

    def kind(self, first: int, count: int) -> int:
        """Return a number that all blocks share on which stages cost the same."""
        if (first, count) not in self._kind_of:
            facts = (self.row.devices, self.row.is_even, self.row.speed, self.row.memory_bytes, self.row.sums)
            look = tuple(fact(first, count) for fact in facts)
            self._kind_of[first, count] = self._kinds.setdefault(look, len(self._kinds))
        return self._kind_of[first, count]

    def load_s(self, first: int, count: int) -> Matrix:
        """Return the seconds of F and B of every stage [a, b) on a block; infinite where there is none."""
        replicas, is_even = self.row.devices(first, count), self.row.is_even(first, count)
        mean = self.row.speed(first, count) / replicas
        return self._once(("load", replicas, is_even, mean), lambda: self._share(replicas, is_even)[0] / mean)

    def sum_s(self, first: int, count: int) -> Matrix:
        """Return the seconds of the sums of gradients of every stage on a block."""
        if not self._problem.training:
            return self._once(("sum",), lambda: np.zeros_like(self.segments.trained_bytes))
        table = self.row.sums(first, count)
        return self._once(("sum", table), lambda: read_sums(table, self.segments.trained_bytes))

    def link_s(self, first: int, count: int, thens: tuple[int, ...]) -> Matrix:
        """Return [then, b]: the seconds, there and back, of what crosses every bound to the units behind a block."""
        return self._once(
            ("links", first, count, thens), lambda: np.stack([self._one_link_s(first, count, then) for then in thens])
        )

    def _one_link_s(self, first: int, count: int, then: int) -> Matrix:
        lines = self.row.exchange(first, count, then)
        return self._once(("link", lines), lambda: self._crossing_s(lines))

    def _crossing_s(self, lines: tuple[LinkLine, LinkLine]) -> Vector:
        handing_s = self._problem.profile.message_s
        total = np.zeros(self.segments.units + 1)
        for line, crossing in zip(lines, self._crossing, strict=True):
            if crossing is not None:
                total += np.maximum(handing_s, line.fixed_s + line.s_per_byte * crossing)
        return total

    def _once(self, key: tuple[object, ...], make: Callable[[], Matrix]) -> Matrix:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @cached_property
    def _crossing(self) -> tuple[Vector, Vector | None]:
        found = self.segments.crossing
        return found["F"].bytes(self.samples), found["B"].bytes(self.samples) if self._problem.training else None

    def balanced_s(self) -> float:
        """Return the seconds of a stage if all devices shared a micro-batch perfectly."""
        whole = float(self._share(1, True)[0][0, -1])
        return whole / self.row.speed(0, len(self.row))

    def in_flight(self, first: int, count: int) -> Matrix:
        """Return how many micro-batches every stage can keep on a block; 0 where it does not fit at all.

        Where plans may recompute, only what arrives needs to be kept.
        """
        replicas, is_even = self.row.devices(first, count), self.row.is_even(first, count)
        memory = self.row.memory_bytes(first, count)
        return self._once(("room", replicas, is_even, memory), lambda: self._kept(replicas, is_even, memory))

    def _kept(self, replicas: int, is_even: bool, memory: int) -> Matrix:
        _, own, saved = self._share(replicas, is_even)
        room = memory - own
        kept = np.floor(np.divide(room, saved, out=np.full_like(room, np.inf), where=saved > 0))
        return np.where(room >= 0, np.maximum(kept, 0.0), 0.0)

    def _share(self, replicas: int, is_even: bool) -> tuple[Matrix, Matrix, Matrix]:
        """Return seconds, bytes of its own, and bytes per micro-batch of every stage with one of so many shares."""
        if (replicas, is_even) not in self._shares:
            segments, n = self.segments, self._slice(replicas, is_even)
            is_stage = np.triu(np.ones((segments.units + 1,) * 2, dtype=bool), k=1)
            seconds = self._seconds(n)
            if n != self.samples / replicas:
                seconds = np.where(self._is_coupled, self._seconds(self.samples / replicas), seconds)
            ends = np.maximum.reduce([crossing.bytes(n) for crossing in segments.crossing.values()])
            reduced = segments.trained_bytes if replicas > 1 else 0.0
            own = segments.state_bytes + self._workspace(n) + np.maximum.outer(ends, ends) + reduced
            saved = segments.saved_bytes.all(n)
            if "recompute" in self._problem.constraints.memory_policies:
                saved = np.broadcast_to(segments.crossing["F"].bytes(n)[:, None], saved.shape)
            self._shares[replicas, is_even] = (np.where(is_stage, seconds, np.inf), own, saved)
        return self._shares[replicas, is_even]

    def _seconds(self, n: float) -> Matrix:
        seconds = self.segments.forward_s.all(n)
        return seconds + self.segments.backward_s.all(n) if self._problem.training else seconds

    def _slice(self, replicas: int, is_even: bool) -> float:
        """Return the samples of a replica: whole ones, so all wait for those with one more, on average.

        Of replicas with different speeds each is taken to get its part exactly.
        """
        if not is_even:
            return self.samples / replicas
        return sum(math.ceil(size / replicas) for size in self._sizes) / len(self._sizes)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return microbatch_sizes(self._problem.samples, round(self._problem.samples / self.samples))

    @cached_property
    def _is_coupled(self) -> NDArray[np.bool_]:
        """Return for every stage whether its replicas take whole micro-batches in turn."""
        graph = self._problem.graph
        coupled = set(graph.coupled)
        before = np.cumsum([0, *(node.name in coupled for node in graph.nodes)])[self.segments.bounds]
        found: NDArray[np.bool_] = before[None, :] > before[:, None]
        return found

    def _workspace(self, n: float) -> Matrix:
        """Return the workspace of every stage: the most of its units'."""
        size = self.segments.units
        units = np.array([self.segments.workspace_bytes(u, u + 1, n) for u in range(size)])
        found = np.zeros((size + 1, size + 1))
        for a in range(size):
            found[a, a + 1 :] = np.maximum.accumulate(units[a:])
        return found

    def pipeline(self, bounds: Sequence[int], degrees: Sequence[int]) -> RowSeconds:
        """Return the seconds of stages on neighbouring blocks; quicker than by matrices, for one pipeline."""
        segments, training = self.segments, self._problem.training
        ends = list(itertools.pairwise((0, *bounds, segments.units)))
        firsts = list(itertools.accumulate(degrees, initial=0))
        loads, sums = [], []
        for (a, b), first, count in zip(ends, firsts, degrees, strict=False):
            replicas = self.row.devices(first, count)
            n = self._slice(replicas, self.row.is_even(first, count) and not self._is_coupled[a, b])
            seconds = segments.forward_s.at(a, b, n) + (segments.backward_s.at(a, b, n) if training else 0.0)
            loads.append(seconds * replicas / self.row.speed(first, count))
            summed = segments.trained_bytes[a : a + 1, b : b + 1] * training
            sums.append(float(read_sums(self.row.sums(first, count), summed)[0, 0]))
        pairs = zip(bounds, firsts, degrees, degrees[1:], strict=False)
        links = [float(self._one_link_s(first, count, then)[bound]) for bound, first, count, then in pairs]
        return RowSeconds(tuple(loads), tuple(links), tuple(sums))


def within_memory(estimator: Estimator, outline: Candidate) -> tuple[Candidate, float]:
    """Return an outline with its depths lowered as far as memory asks for, and the bytes that are missing all the same.

    Depths are lowered together, towards the least that are different in all stages (S - s). Stages with equal depths
    wait for each other: the later one's next backward stands behind a forward that the earlier one cannot do before its
    own backward of the micro-batch before. Only where memory has no room for different depths do equal ones remain.

    Where plans may recompute, no depth is lowered below S - s unless what arrives for a stage alone is too much.
    """
    rooms = estimator.rooms(outline.cuts, outline.ranks, outline.microbatches)
    may_recompute = "recompute" in estimator.problem.constraints.memory_policies
    kept = [room.arriving if may_recompute else room.saved for room in rooms]
    most = [_fitting(room.bytes, room.saved) for room in rooms]
    different = [len(rooms) - s for s in range(len(rooms))]
    if may_recompute:
        arriving = (min(d, _fitting(room.bytes, room.arriving)) for d, room in zip(different, rooms, strict=True))
        most = [max(pair) for pair in zip(most, arriving, strict=True)]
    for part in range(_PARTS, -1, -1):
        wanted = [d + (w - d) * part // _PARTS for d, w in zip(different, outline.depths, strict=True)]
        depths = [min(depth, outline.microbatches) for depth in wanted]
        if all(depth <= m for depth, m in zip(depths, most, strict=True)):
            break
    lowered = never_growing([min(pair) for pair in zip(depths, most, strict=True)])
    missing = max(depth * each - room.bytes for depth, each, room in zip(lowered, kept, rooms, strict=True))
    return replace(outline, depths=lowered), missing


def _fitting(room: float, each: float) -> int:
    """Return how many fit, at least one."""
    return max(1, int(min(room / each, _NO_LIMIT))) if each else _NO_LIMIT
