"""Laws of measured clusters: noise makes no difference, real differences are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lightning_pipe.core.cluster import NO_LINK, Cluster, Link, PairLink, Reduction
from lightning_pipe.core.cluster_file import cluster_from_text, cluster_to_text
from lightning_pipe.errors import ClusterError
from lightning_pipe.profiler.devices import (
    DeviceFacts,
    benchmark,
    build_cluster,
    describe_device,
    hosts_of,
    overhead_bytes,
)
from lightning_pipe.profiler.network.link_probe import LinkFacts, pairs_to_measure

GPU = DeviceFacts("a", "V100", "", 16 * 2**30, 0.010)
CPU = DeviceFacts("a", "EPYC, 1 thread", "host", 24 * 2**30, 0.010)


def facts_of(*hosts: str, **changes: float) -> list[DeviceFacts]:
    return [replace(GPU, host=host, memory=f"gpu {rank}", **changes) for rank, host in enumerate(hosts)]


def links_of(facts: list[DeviceFacts], link: dict[tuple[str, str], Link], noise: float = 0.0) -> LinkFacts:
    """Measure every pair as if its hosts had these links, every second one faster by this share."""
    return LinkFacts(
        tuple(
            PairLink(a, b, Link(found.latency_s, found.bytes_per_s * (1 + noise * (a % 2))))
            for a, b in pairs_to_measure(hosts_of(facts))
            for found in [link[facts[a].host, facts[b].host]]
        )
    )


FAST, SLOW, SLOWER = Link(1e-5, 40e9), Link(3e-5, 3e9), Link(3e-5, 1e9)
TWO = {("a", "a"): FAST, ("b", "b"): FAST, ("a", "b"): SLOW, ("b", "a"): SLOW}


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_equal_hosts_are_equal_whatever_noise_says(noise: float) -> None:
    facts = facts_of("a", "a", "b", "b")
    facts[1] = replace(facts[1], benchmark_s=0.010 * (1 + noise))
    cluster = build_cluster(facts, links_of(facts, TWO, noise))
    assert [host.name for host in cluster.hosts] == ["a", "b"]
    assert {device.speed for host in cluster.hosts for device in host.devices} == {1.0}
    assert cluster.links == ()
    assert cluster.link(0, 1).bytes_per_s == pytest.approx(40e9, rel=noise + 1e-9)
    assert cluster.link(0, 3).bytes_per_s == pytest.approx(3e9, rel=noise + 1e-9)


def test_a_pair_that_differs_keeps_its_link() -> None:
    facts = facts_of("a", "a", "a")
    measured = links_of(facts, TWO)
    odd = PairLink(0, 1, Link(1e-5, 5e9))
    cluster = build_cluster(facts, LinkFacts((odd, *measured.links[1:])))
    assert cluster.links == (odd,)
    assert cluster.link(1, 2) == FAST


def test_the_slower_of_two_network_cards_decides() -> None:
    facts = facts_of("a", "b", "c")
    link = {(x, y): SLOWER if "b" in (x, y) else SLOW for x in "abc" for y in "abc"}
    cluster = build_cluster(facts, links_of(facts, link))
    assert [host.network for host in cluster.hosts] == [SLOW, SLOWER, SLOW]
    assert cluster.links == ()
    assert {host.inside for host in cluster.hosts} == {NO_LINK}


def test_hosts_are_found_where_only_neighbours_are_measured() -> None:
    facts = facts_of(*(f"host {h}" for h in range(12)))
    link = {(x.host, y.host): SLOW for x in facts for y in facts}
    cluster = build_cluster(facts, links_of(facts, link))
    assert {host.network for host in cluster.hosts} == {SLOW}


@pytest.mark.parametrize(
    ("seconds", "speeds"),
    [
        ((0.010, 0.011, 0.0095, 0.010), [1.0, 1.0, 1.0, 1.0]),
        ((0.010, 0.010, 0.020, 0.010), [1.0, 1.0, 0.5, 1.0]),
        ((0.020, 0.010, 0.010, 0.010), [1.0, 2.0, 2.0, 2.0]),
    ],
)
def test_devices_of_one_kind_differ_in_speed_only_beyond_noise(seconds: tuple[float, ...], speeds: list[float]) -> None:
    facts = [replace(fact, benchmark_s=s) for fact, s in zip(facts_of(*"aaaa"), seconds, strict=True)]
    cluster = build_cluster(facts, links_of(facts, TWO))
    assert [cluster.device(rank).speed for rank in range(4)] == speeds


def test_kinds_differ_in_speed_by_their_medians() -> None:
    facts = facts_of("a", "a", "b", "b")
    facts[2:] = [replace(fact, kind="T4", benchmark_s=0.025) for fact in facts[2:]]
    cluster = build_cluster(facts, links_of(facts, TWO))
    assert [(cluster.device(rank).kind, cluster.device(rank).speed) for rank in (0, 3)] == [("V100", 1.0), ("T4", 0.4)]


def test_ranks_share_the_memory_of_their_host_or_of_their_gpu() -> None:
    facts = [CPU, CPU, CPU, replace(GPU, host="b"), replace(GPU, host="b")]
    cluster = build_cluster(facts, links_of(facts, TWO))
    assert [cluster.device(rank).memory_bytes for rank in (0, 4)] == [8 * 2**30, 8 * 2**30]


def test_ranks_are_numbered_host_by_host() -> None:
    assert hosts_of(facts_of("b", "b", "a")) == (0, 0, 1)
    with pytest.raises(ClusterError, match=r"ranks \[0, 2\] on host 'a' with ranks of other hosts between them"):
        hosts_of(facts_of("a", "b", "a"))


def test_a_measured_cluster_has_three_digits_and_can_be_saved() -> None:
    facts = facts_of("a", "b")
    measured = LinkFacts(
        tuple(PairLink(a, b, Link(1.23456e-5, 9.87654e8)) for a, b in ((0, 1), (1, 0))),
        (Reduction((0, 1), 3.33333e-5, 5.55555e8, Link(2.22222e-6, 1.23456e8)),),
    )
    cluster = build_cluster(facts, measured)
    assert cluster.hosts[0].network == Link(1.23e-5, 9.88e8)
    assert cluster.reductions == (Reduction((0, 1), 3.33e-5, 5.56e8, Link(2.22e-6, 1.23e8)),)
    assert cluster_from_text(cluster_to_text(cluster)) == cluster


def test_one_rank_is_a_cluster() -> None:
    facts = describe_device(torch.device("cpu"), host="here", benchmark_s=0.01)
    cluster = build_cluster([facts], LinkFacts())
    assert isinstance(cluster, Cluster) and cluster.ranks == 1
    assert 2**20 < facts.memory_bytes < 2**50
    assert str(torch.get_num_threads()) in facts.kind
    assert benchmark(torch.device("cpu")) > 0


def test_communicators_and_libraries_are_taken_off_the_memory_of_plans() -> None:
    before, after = facts_of("a")[0], replace(facts_of("a")[0], memory_bytes=15 * 2**30)
    overhead = overhead_bytes(before, after, communicator_bytes=2**28, ranks=4)
    assert overhead == 2**30 + (4 + 3) * 2**28  # two pairs with each of two neighbours, and three groups
    facts = [replace(fact, overhead_bytes=overhead) for fact in facts_of("a", "a")]
    cluster = build_cluster(facts, links_of(facts, TWO))
    assert cluster.device(1).memory_bytes == 16 * 2**30 - overhead
    assert cluster.overhead_bytes == overhead


def test_nothing_is_taken_off_where_the_host_carries_messages() -> None:
    before, after = facts_of("a")[0], replace(facts_of("a")[0], memory_bytes=15 * 2**30)
    assert overhead_bytes(before, after, communicator_bytes=0, ranks=4) == 0
