"""What an order of devices promises: hosts in one piece, fast neighbours, nothing that depends on ranks' numbers."""

from __future__ import annotations

import itertools
import random

import networkx
import numpy as np
import pytest

from lightning_pipe.core.cluster import Cluster, Device, Host, Link, PairLink
from lightning_pipe.planner.candidates.device_order import device_order, minimum_cut, order_of, quality

DEVICE = Device("x", 1 << 40)


def hosts(counts: list[int], *, cards: list[float], inside: float = 100.0) -> Cluster:
    return Cluster(
        tuple(
            Host(f"h{i}", (DEVICE,) * count, Link(0.0, inside), Link(0.0, card))
            for i, (count, card) in enumerate(zip(counts, cards, strict=True))
        )
    )


def complete(size: int, seed: int) -> np.ndarray:
    draw = np.random.default_rng(seed).uniform(1.0, 20.0, (size, size))
    return np.triu(draw, k=1) + np.triu(draw, k=1).T


def summed(weights: np.ndarray, order: tuple[int, ...]) -> float:
    return float(sum(weights[u, v] for u, v in itertools.pairwise(order)))


@pytest.mark.parametrize("size", [2, 3, 5, 9, 14])
def test_cuts_are_minimal_as_networkx_finds_them(size):
    for seed in range(5):
        weights = complete(size, seed)
        graph = networkx.from_numpy_array(weights)
        side, across = minimum_cut(weights)
        others = [v for v in range(size) if v not in side]
        assert across == pytest.approx(networkx.stoer_wagner(graph)[0])
        assert weights[np.ix_(side, others)].sum() == pytest.approx(across)


@pytest.mark.parametrize("counts", [[4, 4], [8, 8], [3, 5], [1, 6]])
@pytest.mark.parametrize("inside", [100.0, 30.0, 11.0])
def test_hosts_stay_in_one_piece(counts, inside):
    order = device_order(hosts(counts, cards=[10.0, 10.0], inside=inside))
    devices = hosts(counts, cards=[10.0, 10.0])
    visited = [devices.host_of(rank) for rank in order]
    assert sorted(order) == list(range(sum(counts)))
    assert sum(a != b for a, b in itertools.pairwise(visited)) == 1, order


def test_equal_links_keep_the_order_of_the_ranks():
    assert device_order(hosts([4], cards=[10.0])) == (0, 1, 2, 3)
    assert device_order(hosts([2] * 5, cards=[10.0] * 5)) == tuple(range(10))


def test_racks_are_visited_one_after_the_other():
    between = {(0, 2): 40.0, (1, 3): 40.0}  # hosts 0 and 2 share a rack, so do 1 and 3
    links = tuple(PairLink(*ends, Link(0.0, rate)) for (u, v), rate in between.items() for ends in ((u, v), (v, u)))
    single = hosts([1] * 4, cards=[10.0] * 4)
    assert device_order(Cluster(single.hosts, links)) == (0, 2, 1, 3)


def test_the_fastest_link_joins_the_two_parts():
    weights = np.array([[0, 50, 3, 1], [50, 0, 1, 1], [3, 1, 0, 50], [1, 1, 50, 0]], dtype=float)
    assert order_of(weights) == (1, 0, 2, 3)


@pytest.mark.parametrize("size", [5, 8, 12])
def test_numbering_the_ranks_anew_changes_no_quality(size):
    for seed in range(5):
        weights = complete(size, seed)
        new = random.Random(seed).sample(range(size), k=size)
        assert summed(weights, order_of(weights)) == pytest.approx(
            summed(weights[np.ix_(new, new)], order_of(weights[np.ix_(new, new)]))
        )


def test_numbering_hosts_anew_changes_no_quality():
    cards = [10.0, 10.0, 25.0, 25.0, 40.0, 10.0]
    devices = [hosts([2] * 6, cards=random.Random(seed).sample(cards, k=6)) for seed in range(6)]
    assert len({quality(cluster, device_order(cluster)) for cluster in devices}) == 1


def test_an_order_is_better_than_that_of_shuffled_ranks():
    weights = complete(12, 0)
    shuffled = [summed(weights, tuple(random.Random(seed).sample(range(12), k=12))) for seed in range(20)]
    assert summed(weights, order_of(weights)) > max(shuffled), shuffled


def test_unlimited_links_have_an_order_too():
    links = tuple(PairLink(u, v, Link(0.0, 10.0)) for u in range(6) for v in range(6) if u != v and {u, v} != {0, 5})
    cluster = Cluster(hosts([1] * 6, cards=[float("inf")] * 6).hosts, links)
    order = device_order(cluster)
    assert sorted(order) == list(range(6))
    assert abs(order.index(0) - order.index(5)) == 1


def test_measured_equal_links_are_equal():
    links = tuple(PairLink(u, v, Link(0.0, 0.8e9)) for u in range(6) for v in range(6) if u != v)
    assert device_order(Cluster(hosts([1] * 6, cards=[float("inf")] * 6).hosts, links)) == tuple(range(6))


def test_very_many_different_hosts_are_ordered():
    order = device_order(hosts([1] * 300, cards=[float(1 + (7 * i) % 300) for i in range(300)]))
    assert sorted(order) == list(range(300))
