"""Ranks measure their links over gloo: all of them learn the same, and it makes a cluster."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.core.cluster_file import check_ranks, cluster_from_text, cluster_to_text
from lightning_pipe.profiler.devices import DeviceFacts, benchmark, build_cluster, describe_device
from lightning_pipe.profiler.network.link_probe import (
    LinkFacts,
    ProbeHandle,
    groups_to_measure,
    pairs_to_measure,
    probe_links,
)
from lightning_pipe.runtime.transport.process_group import process_group_transport
from ranks.world import World

CPU = torch.device("cpu")


def settle(handle: ProbeHandle, what: str) -> None:
    while not handle.wait(1.0):
        pass


def probe_twice(hosts: tuple[int, ...]) -> tuple[LinkFacts, LinkFacts, DeviceFacts]:
    transport = process_group_transport(CPU, deadline_s=20)
    found = [probe_links(transport, hosts=hosts, device=CPU, wait=settle) for _ in range(2)]
    transport.close()
    return found[0], found[1], describe_device(CPU, benchmark_s=benchmark(CPU), host=f"host {hosts[dist.get_rank()]}")


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("hosts", [(0, 0), (0, 1), (0, 0, 1)], ids=str)
def test_all_ranks_learn_the_same_links(hosts: tuple[int, ...]) -> None:
    results = World(len(hosts)).run(probe_twice, hosts)
    for which in (0, 1):
        measured = results[0][which]
        assert all(result[which] == measured for result in results)
        assert [(pair.sender, pair.receiver) for pair in measured.links] == list(pairs_to_measure(hosts))
        assert [found.ranks for found in measured.reductions] == list(groups_to_measure(hosts))
        links = [pair.link for pair in measured.links]
        numbers = [(x.latency_s, x.bytes_per_s) for x in (*links, *measured.reductions)]
        assert all(1e-6 < latency_s < 1 and 1e6 < bytes_per_s < 1e12 for latency_s, bytes_per_s in numbers), numbers
    cluster = build_cluster([result[2] for result in results], results[0][0])
    check_ranks(cluster, len(hosts), source="what was measured")
    assert [cluster.host_of(rank) for rank in range(len(hosts))] == list(hosts)
    assert cluster_from_text(cluster_to_text(cluster)) == cluster
