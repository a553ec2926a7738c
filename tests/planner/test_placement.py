"""What DAPPLE's placement must say: its three policies by hand, and the same whatever equal hosts are called."""

from __future__ import annotations

import itertools

import pytest

from lightning_pipe.core.cluster import Cluster, Device, Host, Link, PairLink
from lightning_pipe.planner.systems.dapple.placement import Site, canonical, placements, ranks_of, reorder, site_of

TWO_BY_FOUR = Site((4, 4), (0, 0))
LINK = Link(0.0, 1e9)


@pytest.mark.parametrize(
    ("used", "count", "fresh", "append", "scatter"),
    [
        ((0, 0), 3, (3, 0), (3, 0), (2, 1)),  # all are fresh: scatter takes from all
        ((0, 0), 6, (4, 2), (4, 2), (3, 3)),
        ((1, 0), 3, (0, 3), (3, 0), (3, 0)),  # one is used: scatter takes from the used ones
        ((1, 0), 5, (1, 4), (3, 2), (3, 2)),  # no policy stops at what it prefers
        ((1, 1), 3, (3, 0), (3, 0), (2, 1)),
        ((3, 1), 2, (1, 1), (1, 1), (1, 1)),
        ((4, 0), 2, (0, 2), (0, 2), (0, 2)),  # a full host gives nothing
    ],
)
def test_three_policies_on_two_hosts_of_four(used, count, fresh, append, scatter):
    assert placements(TWO_BY_FOUR, used, count) == list(dict.fromkeys((fresh, append, scatter)))


def test_scatter_prefers_all_used_hosts_to_fresh_ones():
    site = Site((4, 4, 4), (0, 0, 0))
    assert placements(site, (1, 1, 0), 4) == [(0, 0, 4), (3, 1, 0), (2, 2, 0)]


def test_hosts_of_every_kind_are_tried_first():
    site = Site((2, 4), (0, 1))
    assert set(placements(site, (0, 0), 2)) == {(2, 0), (0, 2), (1, 1)}
    assert placements(Site((2, 4), (0, 0)), (0, 0), 2) == [(2, 0), (1, 1)]


def test_every_result_takes_what_is_free_and_no_more():
    for used in itertools.product(range(5), range(3), range(4)):
        site = Site((4, 2, 3), (0, 1, 2))
        free = [size - taken for size, taken in zip(site.capacity, used, strict=True)]
        for count in range(1, 10):
            found = placements(site, used, count)
            assert bool(found) == (count <= sum(free))
            assert len(found) == len(set(found))
            for taken in found:
                assert sum(taken) == count
                assert all(0 <= t <= f for t, f in zip(taken, free, strict=True)), (used, taken)


def test_equal_hosts_are_told_apart_by_what_is_used_of_them_only():
    site = Site((4, 2, 4, 2), (0, 1, 0, 1))
    found = {reorder(used, canonical(site, used)) for used in itertools.permutations((3, 1, 2, 0))}
    assert all(used[0] >= used[2] and used[1] >= used[3] for used in found)
    order = canonical(site, (1, 0, 3, 2))
    assert (order, reorder((1, 0, 3, 2), order)) == ((2, 3, 0, 1), (3, 2, 1, 0))


def test_ranks_are_the_next_devices_of_every_host():
    assert ranks_of(Site((4, 2, 3), (0, 1, 2)), (1, 2, 0), (2, 0, 3)) == (1, 2, 6, 7, 8)


def host(name: str, *, count: int = 2, speed: float = 1.0) -> Host:
    return Host(name, (Device("x", 1 << 30, speed),) * count, inside=LINK, network=LINK)


def test_hosts_are_alike_if_devices_and_links_are():
    hosts = (host("a"), host("b", count=3), host("c"), host("d", speed=2.0))
    assert site_of(Cluster(hosts)).kinds == (0, 1, 0, 2)
    slow = PairLink(0, 2, Link(0.0, 1e6))
    assert site_of(Cluster((host("a"), host("b"), host("c")), links=(slow,))).kinds == (0, 1, 2)
    pairs = tuple(PairLink(a, b, slow.link) for a in range(4) for b in range(4) if a // 2 != b // 2)
    assert site_of(Cluster((host("a"), host("b")), links=pairs)).kinds == (0, 0)
