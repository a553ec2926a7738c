"""Laws of the probe: what is measured, in which order, and that a link's latency and bandwidth are found."""

from __future__ import annotations

import itertools
import queue
import random

import pytest
import torch

from lightning_pipe.core.cluster import Link, PairLink
from lightning_pipe.profiler.network import link_probe
from lightning_pipe.profiler.network.alpha_beta import AlphaBeta, fit_line, fit_two_lines
from lightning_pipe.profiler.network.link_probe import (
    EVERY_PAIR_UP_TO,
    ProbeHandle,
    computing,
    groups_to_measure,
    links_to_check,
    pairs_to_measure,
    probe_links,
    rounds,
)

HOSTS = {
    "one rank": (0,),
    "two ranks": (0, 0),
    "two hosts": (0, 1),
    "uneven": (0, 0, 0, 1),
    "eight ranks": (0,) * 8,
    "two servers": (0,) * 8 + (1,) * 8,
    "sixteen hosts": tuple(range(16)),
    "mixed": (0, 1, 1, 1, 1, 2, 2, 3, 3, 3),
}
every_cluster = pytest.mark.parametrize("hosts", HOSTS.values(), ids=HOSTS)


@every_cluster
def test_every_pair_of_few_ranks_is_measured_and_every_kind_of_link_of_many(hosts: tuple[int, ...]) -> None:
    pairs = pairs_to_measure(hosts)
    assert len(set(pairs)) == len(pairs)
    if len(hosts) <= EVERY_PAIR_UP_TO:
        assert set(pairs) == set(itertools.permutations(range(len(hosts)), 2))
        return
    assert {(b, a) for a, b in pairs} == set(pairs), "both directions"
    inside = [hosts[a] for a, b in pairs if hosts[a] == hosts[b]]
    assert sorted(inside) == sorted([host for host in set(hosts) if hosts.count(host) > 1] * 2), "once per host"
    across = {frozenset((hosts[a], hosts[b])) for a, b in pairs if hosts[a] != hosts[b]}
    few = len(set(hosts)) <= EVERY_PAIR_UP_TO
    assert len(across) == (len(set(hosts)) * (len(set(hosts)) - 1) // 2 if few else len(set(hosts)))
    assert set().union(*across) == set(hosts)


@every_cluster
def test_groups_are_powers_of_two_and_everyone(hosts: tuple[int, ...]) -> None:
    groups = groups_to_measure(hosts)
    assert len(set(groups)) == len(groups)
    assert all(len(group) > 1 and list(group) == sorted(set(group)) for group in groups)
    assert (tuple(range(len(hosts))) in groups) == (len(hosts) > 1)
    for host in set(hosts):
        members = tuple(rank for rank, of_rank in enumerate(hosts) if of_rank == host)
        assert len(members) == 1 or members in groups


@every_cluster
def test_links_between_hosts_and_inside_of_them_tell_whether_links_have_changed(hosts: tuple[int, ...]) -> None:
    measured = tuple(PairLink(a, b, Link(1e-4, 1e9)) for a, b in pairs_to_measure(hosts))
    checked = links_to_check(measured, hosts)
    assert set(checked) <= set(measured) and len(set(checked)) == len(checked) <= 8
    for is_inside in (False, True):
        some, all_ = (
            [x for x in xs if (hosts[x.sender] == hosts[x.receiver]) == is_inside] for xs in (checked, measured)
        )
        assert bool(some) == bool(all_)


def test_groups_of_two_servers() -> None:
    assert groups_to_measure(HOSTS["two servers"]) == (
        *[tuple(range(start, start + count)) for start in (0, 8) for count in (2, 4, 8)],
        (0, 8),
        tuple(range(16)),
    )


@every_cluster
def test_nothing_that_shares_a_host_is_measured_together(hosts: tuple[int, ...]) -> None:
    for units in (pairs_to_measure(hosts), groups_to_measure(hosts)):
        found = rounds(units, hosts)
        assert sorted(itertools.chain.from_iterable(found)) == list(range(len(units)))
        for together in found:
            busy = [host for index in together for host in {hosts[rank] for rank in units[index]}]
            assert len(set(busy)) == len(busy)


class Wire:
    """A simulated link: a token bucket that lets `burst` bytes pass at once and the rest at the rate, and noise."""

    def __init__(self, *, latency_s: float, bytes_per_s: float, burst: int, noise: float = 0.0) -> None:
        self.latency_s, self.bytes_per_s, self.burst, self.noise = latency_s, bytes_per_s, burst, noise
        self.now, self._tokens = 0.0, float(burst)
        self._rng = random.Random(0)

    def trip(self, count: int) -> float:
        """Send this many bytes and get an answer; return the seconds."""
        sending = max(0.0, count - self._tokens) / self.bytes_per_s
        self._tokens = max(0.0, self._tokens - count)
        spent = 2 * self.latency_s + sending
        if self._rng.random() < self.noise:
            spent *= 5
        self.now += spent
        self._tokens = min(self.burst, self._tokens + (spent - sending) * self.bytes_per_s)
        return spent


@pytest.mark.parametrize("burst", [0, 2**16, 2**18])
@pytest.mark.parametrize("bytes_per_s", [12.5e6, 125e6, 3e9, 300e9])
@pytest.mark.parametrize("latency_s", [10e-6, 1e-3])
def test_latency_and_bandwidth_are_found_within_a_second(latency_s: float, bytes_per_s: float, burst: int) -> None:
    wire = Wire(latency_s=latency_s, bytes_per_s=bytes_per_s, burst=burst)
    line = fit_line(wire.trip)
    assert line.fixed_s == pytest.approx(2 * latency_s, rel=0.05)
    assert line.bytes_per_s == pytest.approx(bytes_per_s, rel=0.15)
    assert wire.now < 1.0


def test_a_few_slow_transfers_change_nothing() -> None:
    wire = Wire(latency_s=100e-6, bytes_per_s=125e6, burst=0, noise=0.2)
    line = fit_line(wire.trip)
    assert line.fixed_s == pytest.approx(200e-6, rel=0.001)
    assert line.bytes_per_s == pytest.approx(125e6, rel=0.01)


def test_a_link_too_fast_to_measure_has_a_bandwidth_all_the_same() -> None:
    line = fit_line(lambda count: 1e-5)
    assert 0 < line.bytes_per_s < float("inf")


@pytest.mark.parametrize("most", [2**24, 25 * 2**20])
def test_few_bytes_have_a_line_of_their_own_where_they_go_another_way(most: int) -> None:
    few = AlphaBeta(20e-6, 1e9)
    many = AlphaBeta(20e-6 + most / 16 * (1 / 1e9 - 1 / 8e9), 8e9)  # which meet at a sixteenth of the most

    def seconds(count: int) -> float:
        return min(line.fixed_s + count / line.bytes_per_s for line in (few, many))

    found = fit_two_lines(seconds, most_bytes=most)
    for count in (8, 2**16, 2**18, 2**20, 2**22, 2**24):
        taken_s = min(line.fixed_s + count / line.bytes_per_s for line in found if line is not None)
        assert taken_s == pytest.approx(seconds(count), rel=1e-3)


@pytest.mark.parametrize("count", [2**10, 2**20, 2**24])
def test_one_line_stands_for_what_is_one_line_or_rises_faster_later(count: int) -> None:
    line, few = fit_two_lines(lambda n: 1e-5 + n / 1e9, most_bytes=2**24)
    assert few is None or few.fixed_s + count / few.bytes_per_s == pytest.approx(1e-5 + count / 1e9, rel=1e-3)
    assert line.fixed_s + count / line.bytes_per_s == pytest.approx(1e-5 + count / 1e9, rel=1e-3)
    assert fit_two_lines(lambda n: 1e-5 + max(n / 8e9, n / 1e9 - 1e-3), most_bytes=2**24)[1] is None


class Silent:
    """A transport whose peer never comes."""

    rank = 0

    def open(self, *, channels: object, groups: object) -> None:
        """Do nothing."""

    def send(self, tensors: object, *, peer: int) -> ProbeHandle:
        return self

    def receive(self, buffers: object, *, peer: int, owners: object = ()) -> ProbeHandle:
        return self

    def all_reduce(self, tensor: object, *, group: object) -> ProbeHandle:
        return self

    def wait(self, timeout_s: float) -> bool:
        return False

    def landed(self) -> bool:
        return False


class OverdueError(Exception):
    pass


def test_every_wait_is_the_callers() -> None:
    def wait(handle: ProbeHandle, what: str) -> None:
        if not handle.wait(0):
            raise OverdueError(what)

    with pytest.raises(OverdueError, match="rank 1 to take a measured message"):
        probe_links(Silent(), hosts=(0, 1), device=torch.device("cpu"), wait=wait)
    assert probe_links(Silent(), hosts=(0,), device=torch.device("cpu"), wait=wait).links == ()


class Instant(Silent):
    """A transport on which every transfer is done at once; it keeps (bytes, bytes of memory) of all sums."""

    def __init__(self) -> None:
        self.sums: list[tuple[int, int]] = []

    def all_reduce(self, tensor: torch.Tensor, *, group: object) -> ProbeHandle:
        self.sums.append((tensor.nbytes, tensor.untyped_storage().nbytes()))
        return self

    def wait(self, timeout_s: float) -> bool:
        return True

    def landed(self) -> bool:
        return True

    def trim(self) -> None:
        pass


def test_sums_are_timed_with_the_copy_of_gradients_into_one_piece() -> None:
    """Sums of what was in one piece already were a quarter too short, and data parallel training seemed too cheap."""
    transport = Instant()
    found = probe_links(transport, hosts=(0, 0), device=torch.device("cpu"), wait=lambda handle, what: None)
    assert [measured.ranks for measured in found.reductions] == [(0, 1)]
    assert all(summed == memory for summed, memory in transport.sums), "sums take place in memory of their own"


class Clock:
    """Time that passes when somebody waits, and a little whenever somebody looks."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Summing(Instant):
    """A transport whose sums take a second per MiB: of themselves, or of whoever waits for them."""

    def __init__(self, clock: Clock, *, by_itself: bool) -> None:
        super().__init__()
        self._clock, self._by_itself = clock, by_itself

    def all_reduce(self, tensor: torch.Tensor, *, group: object) -> ProbeHandle:
        return Sum(self._clock, tensor.nbytes / 2**20, by_itself=self._by_itself)


class Sum:
    def __init__(self, clock: Clock, seconds: float, *, by_itself: bool) -> None:
        self._clock, self._seconds, self._since = clock, seconds, clock.now if by_itself else None

    def wait(self, timeout_s: float) -> bool:
        end = self._seconds + (self._clock.now if self._since is None else self._since)
        self._clock.now = max(self._clock.now, end)
        self._since, self._seconds = self._clock.now, 0.0
        return True

    def landed(self) -> bool:
        return True


@pytest.mark.parametrize(("by_itself", "share"), [(True, 0.0), (False, 1.0)])
def test_how_busy_sums_keep_a_rank_is_what_is_left_when_they_could_be_over(
    by_itself: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(link_probe, "time", clock)
    transport = Summing(clock, by_itself=by_itself)

    def wait(handle: ProbeHandle, what: str) -> None:
        assert handle.wait(1.0)

    found = probe_links(transport, hosts=(0, 0, 0), device=torch.device("cpu"), wait=wait)
    assert found.sum_busy_share == pytest.approx(share, abs=1e-3)


def test_what_computes_meanwhile_has_as_many_threads_as_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = queue.SimpleQueue[int]()
    monkeypatch.setattr(torch, "mm", lambda *_: seen.put(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(before + 2)
    try:
        with computing(torch.device("cpu")):
            assert seen.get(timeout=60) == before + 2
    finally:
        torch.set_num_threads(before)
