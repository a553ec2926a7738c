"""Formulas of communication, against published unit values and against each other."""

from __future__ import annotations

import pytest

from lightning_pipe.core.cluster import Cluster, Device, Host, Link, PairLink, Reduction
from lightning_pipe.core.program import Layout
from lightning_pipe.cost.comm import all_reduce_s, exchange_of, exchange_pairs, flow_s, flows, hierarchies_of, ring_of

GB = 1e9


INSIDE, NETWORK = Link(0.0, 25 * GB), Link(0.0, GB)


def cluster(hosts: int, devices: int, *, inside=INSIDE, network=NETWORK, **more) -> Cluster:
    device = Device("V100", 16 * 2**30)
    return Cluster(
        tuple(Host(f"h{h}", (device,) * devices, inside=inside, network=network) for h in range(hosts)), **more
    )


def test_all_reduce_inside_a_server_of_eight():
    """HPGO's unit value: 2 x 7/8 x 1 GB at 100 GB/s."""
    there = cluster(2, 8, inside=Link(0.0, 100 * GB))
    assert all_reduce_s(there, range(8), count=GB) == pytest.approx(2 * 7 / 8 / 25 / 4)


def test_ring_across_servers():
    """HPGO's unit value: 2 x 7/8 x 1 GB at 3 GB/s, which NCCL's rings reach between servers."""
    there = cluster(2, 8, network=Link(0.0, 3 * GB))
    assert ring_of(there, [0, 1, 2, 3, 8, 9, 10, 11]).seconds(GB) == pytest.approx(2 * 7 / 8 / 3)


def test_exchange_between_stages_over_two_servers():
    """HPGO's unit value: 1 GB from {0,1,8,9} to {10..13}: half of it crosses one card of 1 GB/s."""
    there = cluster(2, 8, inside=Link(0.0, 1e6 * GB))
    pairs = exchange_pairs(Layout(((0, 1, 8, 9), (10, 11, 12, 13))), 0, 1, 0)
    assert exchange_of(there, pairs).seconds(GB) == pytest.approx(0.5)


def test_a_ring_takes_two_rounds_of_steps_over_its_slowest_link():
    there = cluster(1, 4, inside=Link(1e-3, GB), links=(PairLink(2, 3, Link(2e-3, 0.5 * GB)),))
    assert ring_of(there, range(4)).seconds(GB) == pytest.approx(2 * 3 / 4 * 2.0 + 6 * 2e-3)


def test_two_levels_are_cheaper_where_the_network_is_slow_and_one_where_it_is_not():
    slow = cluster(2, 8)
    inside, between = 2 * 7 / 8 / 25, 2 * 1 / 2 / 1
    (two_levels,) = hierarchies_of(slow, range(16))
    assert two_levels.seconds(GB) == pytest.approx(inside + between)
    assert all_reduce_s(slow, range(16), count=GB) == two_levels.seconds(GB)
    assert all_reduce_s(slow, range(16), count=GB) < ring_of(slow, range(16)).seconds(GB)
    fast = cluster(2, 8, network=Link(0.0, 25 * GB))
    assert all_reduce_s(fast, range(16), count=GB) == ring_of(fast, range(16)).seconds(GB)


def test_two_levels_need_equally_many_ranks_on_several_hosts():
    assert not hierarchies_of(cluster(2, 4), [0, 1, 4])
    assert not hierarchies_of(cluster(1, 4), range(4))


def test_a_measured_reduction_takes_precedence_for_its_ranks():
    there = cluster(1, 4, reductions=(Reduction((0, 1), 0.25, 2 * GB),))
    assert all_reduce_s(there, (0, 1), count=GB) == 0.75
    assert all_reduce_s(there, (0, 1, 2), count=GB) == ring_of(there, (0, 1, 2)).seconds(GB)


def test_few_bytes_take_what_their_own_line_says():
    there = cluster(1, 4, reductions=(Reduction((0, 1), 0.25, 2 * GB, Link(0.125, GB)),))
    assert [all_reduce_s(there, (0, 1), count=n * GB) for n in (0.0, 0.125, 1.0)] == [0.125, 0.25, 0.75]


def test_one_rank_reduces_nothing():
    assert all_reduce_s(cluster(1, 4), (2,), count=GB) == 0.0


def test_flows_that_leave_or_enter_one_host_share_its_card_once():
    """Four ranks of one host send to one rank of another each: four flows, one card."""
    there = cluster(2, 4)
    straight = exchange_pairs(Layout(((0, 1, 2, 3), (4, 5, 6, 7))), 0, 1, 0)
    assert straight == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert set(flows(there, straight).values()) == {(4, 4)}
    assert exchange_of(there, straight).seconds(GB) == pytest.approx(1.0)
    gathered = exchange_pairs(Layout(((0, 1, 2, 3), (4,))), 0, 1, 0)
    assert exchange_of(there, gathered).seconds(GB) == pytest.approx(1.0)
    scattered = exchange_pairs(Layout(((0, 4), (1, 5))), 0, 1, 0)
    assert flows(there, scattered) == {(0, 1): (1, 1), (4, 5): (1, 1)}
    assert exchange_of(there, scattered).seconds(GB) == pytest.approx(0.5 / 25)


def test_independent_flows_of_the_papers_ratio_are_those_of_one_device_per_host():
    """Configurations B and C of DAPPLE have one device per server: every pair has a card of its own."""
    there = cluster(16, 1)
    pairs = exchange_pairs(Layout((tuple(range(8)), tuple(range(8, 16)))), 0, 1, 0)
    assert exchange_of(there, pairs).seconds(GB) == pytest.approx(1 / 8)


def test_a_rank_sends_nothing_to_itself():
    assert exchange_pairs(Layout(((0, 1), (1, 2))), 0, 1, 0) == ((0, 1), (1, 2))
    assert exchange_pairs(Layout(((0,), (0,))), 0, 1, 0) == ()
    assert exchange_of(cluster(1, 1), ()).seconds(GB) == 0.0


def test_unequal_replicas_exchange_where_their_samples_overlap():
    pairs = exchange_pairs(Layout(((0, 1), (2, 3, 4))), 0, 1, 0)
    assert pairs == ((0, 2), (0, 3), (1, 3), (1, 4))


def test_unequal_parts_are_exchanged_where_they_overlap():
    halves = (1, 1)
    assert exchange_pairs(Layout(((0, 1), (2, 3)), weights=((3, 1), halves)), 0, 1, 0) == ((0, 2), (0, 3), (1, 3))
    assert exchange_pairs(Layout(((0, 1), (2, 3)), weights=((1, 9), halves)), 0, 1, 0) == ((0, 2), (1, 2), (1, 3))
    assert exchange_pairs(Layout(((0, 1), (2, 3)), weights=((1, 2), (2, 4))), 0, 1, 0) == ((0, 2), (1, 3))


def test_replicas_that_take_turns_make_one_flow_per_micro_batch():
    layout = Layout(((0, 1), (2, 3, 4)), whole=frozenset({0, 1}))
    assert [exchange_pairs(layout, 0, 1, m) for m in range(3)] == [((0, 2),), ((1, 3),), ((0, 4),)]


def test_a_measured_link_alone_keeps_its_speed_and_shares_the_card_with_others():
    there = cluster(2, 2, links=(PairLink(0, 2, Link(0.0, 2 * GB)),))
    assert flow_s(there, 0, 2, count=GB) == 0.5, "faster than the file says of the card"
    assert flow_s(there, 0, 2, count=GB, out=2) == 1.0
    assert flow_s(there, 0, 3, count=GB, out=2) == 2.0
    assert flow_s(there, 0, 1, count=GB, out=2) == pytest.approx(1 / 25), "inside the host"
