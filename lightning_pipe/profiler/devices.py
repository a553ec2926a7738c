"""Devices of the ranks, and the cluster that they and the measured links make.

    facts = every rank's describe_device(..., benchmark_s=benchmark(device)), by rank
    measured = probe_links(transport, hosts=hosts_of(facts), ...)
    cluster = build_cluster(facts, measured)

Noise must not make equal devices unequal, as planners would then split by it: a benchmark counts with its fastest run,
which other programs disturb least; devices of one kind get the speed of their median unless one differs by more than
15 %; links that differ by less than that from the median of their kind are given by it.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

import torch

from lightning_pipe.capture.device_streams import finish_stream
from lightning_pipe.core.cluster import NO_LINK, NO_SWAP, Cluster, Device, Host, Link, PairLink, Reduction
from lightning_pipe.errors import ClusterError
from lightning_pipe.profiler.network.link_probe import LinkFacts

NOISE = 0.15  # measurements that differ by less are called equal
_TYPICAL_BYTES = 2**20  # of a message between stages, by which links are compared
_BENCHMARK_S = 0.05
_LEAST_RUNS = 5
_MATRIX = {"cuda": 4096}  # rows of the matrices of the benchmark; large enough to fill a GPU, else
_SMALL_MATRIX = 384
_NEIGHBOURS, _GROUPS = 2, 3  # of a rank in a chain of stages
_VECTOR = {"cuda": 2**26}  # elements; larger than the caches of a GPU, else
_SMALL_VECTOR = 2**21
_USABLE = 0.9  # of a memory, if nothing else runs: contexts, libraries and the system take the rest


@dataclass(frozen=True)
class DeviceFacts:
    """What one rank knows of its device.

    Attributes:
        host: name of its host.
        kind: model of the GPU, or of the CPU with the number of threads.
        memory: names the memory, within the host: ranks that name the same one share it.
        memory_bytes: what of it ranks may use, all together.
        benchmark_s: seconds of the benchmark.
        swap: between its memory and that of its host, as measured.
        overhead_bytes: what communicators, contexts and libraries of a rank take of the memory, as measured.
    """

    host: str
    kind: str
    memory: str
    memory_bytes: int
    benchmark_s: float
    swap: Link = NO_SWAP
    overhead_bytes: int = 0


def describe_device(device: torch.device, *, host: str, benchmark_s: float) -> DeviceFacts:
    """Describe the device of this rank.

    Args:
        device: a CUDA device, or one that uses the memory of the host.
        host: name of this host.
        benchmark_s: seconds of `benchmark`.
    """
    if device.type != "cuda":
        return DeviceFacts(host, device_kind(device), "host", available_bytes(), benchmark_s)
    properties = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    return DeviceFacts(host, device_kind(device), str(properties.uuid), free + own, benchmark_s)


def describe_capacity(device: torch.device, *, host: str) -> DeviceFacts:
    """Describe the device of this rank by the memory that it has, whether others use some of it now or not."""
    if device.type != "cuda":
        return DeviceFacts(host, device_kind(device), "host", installed_bytes(), 0.0)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(host, device_kind(device), str(properties.uuid), properties.total_memory, 0.0)


def capacity_bytes(facts: Sequence[DeviceFacts]) -> int:
    """Return what a rank may use of the memory that devices have: the least of all ranks."""
    sharers = Counter((fact.host, fact.memory) for fact in facts)
    return min(int(_USABLE * fact.memory_bytes) // sharers[fact.host, fact.memory] for fact in facts)


def overhead_bytes(before: DeviceFacts, after: DeviceFacts, *, communicator_bytes: int, ranks: int) -> int:
    """Return what a rank's memory holds beside what a plan counts, while programs run.

    Args:
        before: the device when the fit began.
        after: the device once kernels and libraries are loaded, without communicators.
        communicator_bytes: of one communicator.
        ranks: of the pipeline; a rank of a chain has a pair in each direction to two neighbours, and its groups are
            those of all ranks, of its replicas and of its gradients.
    """
    pairs, groups = 2 * min(ranks - 1, _NEIGHBOURS), _GROUPS
    loaded = max(0, before.memory_bytes - after.memory_bytes)
    return (loaded if communicator_bytes else 0) + (pairs + groups) * communicator_bytes


def device_kind(device: torch.device) -> str:
    """Return the model of a GPU, or of the CPU with the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    threads = torch.get_num_threads()
    return f"{_cpu_model()}, {threads} thread{'s' if threads > 1 else ''}"


def benchmark(device: torch.device) -> float:
    """Return the seconds of a matrix product and an addition of vectors in float32: of the fastest of several runs.

    On all ranks at the same time; takes 0.05 s.
    """
    rows, length = _MATRIX.get(device.type, _SMALL_MATRIX), _VECTOR.get(device.type, _SMALL_VECTOR)
    matrix = torch.full((rows, rows), 0.5, device=device)
    vector = torch.full((length,), 0.5, device=device)
    product, total = torch.empty_like(matrix), torch.empty_like(vector)

    def run() -> float:
        start = time.perf_counter()
        torch.mm(matrix, matrix, out=product)
        torch.add(vector, vector, out=total)
        finish_stream(device)
        return time.perf_counter() - start

    with torch.no_grad():
        run()  # the first one loads kernels and touches memory
        return _fastest(run)


def _fastest(run: Callable[[], float]) -> float:
    """Repeat a run for a while, and return the fastest one."""
    seconds: list[float] = []
    while len(seconds) < _LEAST_RUNS or sum(seconds) < _BENCHMARK_S:
        seconds.append(run())
    return min(seconds)


def hosts_of(facts: Sequence[DeviceFacts]) -> tuple[int, ...]:
    """Return the index of the host of every rank.

    Args:
        facts: by rank.

    Raises:
        ClusterError: if the ranks are not numbered host by host.
    """
    names = [name for name, _ in groupby(fact.host for fact in facts)]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        ranks = [rank for rank, fact in enumerate(facts) if fact.host == twice[0]]
        raise ClusterError(
            f"found ranks {ranks} on host {twice[0]!r} with ranks of other hosts between them; expected ranks that are "
            "numbered host by host. Let the launcher number them so (torchrun and Lightning do)."
        )
    return tuple(names.index(fact.host) for fact in facts)


def build_cluster(facts: Sequence[DeviceFacts], measured: LinkFacts) -> Cluster:
    """Return the cluster that devices and measured links make.

    A host's inside is the median of its measured pairs. Its network is the best of the medians towards each other host,
    since the slower of two cards decides. Pairs that differ from what these say keep a link of their own.

    Args:
        facts: by rank.
        measured: what `probe_links` found for them.

    Raises:
        ClusterError: if the ranks are not numbered host by host.
    """
    hosts = hosts_of(facts)
    devices = _devices(facts)
    made = tuple(
        Host(
            name=facts[hosts.index(h)].host,
            devices=tuple(device for device, host in zip(devices, hosts, strict=True) if host == h),
            inside=_median(pair.link for pair in measured.links if {hosts[pair.sender], hosts[pair.receiver]} == {h}),
            network=_network(h, hosts, measured.links),
            swap=_slowest(fact.swap for fact, host in zip(facts, hosts, strict=True) if host == h),
        )
        for h in range(len(set(hosts)))
    )
    plain = Cluster(made)
    links = tuple(_rounded_pair(pair) for pair in measured.links if _differs(pair, plain))
    return Cluster(made, links, tuple(_rounded_reduction(reduction) for reduction in measured.reductions))


def _devices(facts: Sequence[DeviceFacts]) -> list[Device]:
    sharers = Counter((fact.host, fact.memory) for fact in facts)
    return [
        Device(
            fact.kind,
            max(0, fact.memory_bytes // sharers[fact.host, fact.memory] - fact.overhead_bytes),
            speed,
            overhead_bytes=fact.overhead_bytes,
        )
        for fact, speed in zip(facts, _speeds(facts), strict=True)
    ]


def _speeds(facts: Sequence[DeviceFacts]) -> list[float]:
    """Return how many times faster than rank 0 every rank is."""
    kinds = {fact.kind for fact in facts}
    typical = {kind: median(fact.benchmark_s for fact in facts if fact.kind == kind) for kind in kinds}
    seconds = [
        typical[fact.kind] if abs(fact.benchmark_s / typical[fact.kind] - 1) <= NOISE else fact.benchmark_s
        for fact in facts
    ]
    return [_rounded(seconds[0] / own) for own in seconds]


def _network(host: int, hosts: Sequence[int], links: Sequence[PairLink]) -> Link:
    towards = [
        _median(pair.link for pair in links if {hosts[pair.sender], hosts[pair.receiver]} == {host, other})
        for other in set(hosts) - {host}
    ]
    found = [link for link in towards if link != NO_LINK]  # of many hosts only neighbours are measured
    return Link(min(link.latency_s for link in found), max(link.bytes_per_s for link in found)) if found else NO_LINK


def _median(links: Iterable[Link]) -> Link:
    """Return the medians of latency and bandwidth; there is no link between ranks if there is none here."""
    found = list(links)
    if not found:
        return NO_LINK
    latency_s = median(link.latency_s for link in found)
    return Link(_rounded(latency_s), _rounded(median(link.bytes_per_s for link in found)))


def _slowest(swaps: Iterable[Link]) -> Link:
    """Return the slowest link between a device of a host and the host."""
    found = max(swaps, key=lambda swap: swap.seconds(_TYPICAL_BYTES))
    return found if found == NO_SWAP else Link(_rounded(found.latency_s), _rounded(found.bytes_per_s))


def _differs(pair: PairLink, cluster: Cluster) -> bool:
    """Return whether a message over a measured pair takes another time than the hosts say."""
    expected_s = cluster.link(pair.sender, pair.receiver).seconds(_TYPICAL_BYTES)
    return abs(pair.link.seconds(_TYPICAL_BYTES) / expected_s - 1) > NOISE


def _rounded_pair(pair: PairLink) -> PairLink:
    return PairLink(pair.sender, pair.receiver, _rounded_link(pair.link))


def _rounded_reduction(found: Reduction) -> Reduction:
    small = None if found.small is None else _rounded_link(found.small)
    return Reduction(found.ranks, _rounded(found.latency_s), _rounded(found.bytes_per_s), small)


def _rounded_link(link: Link) -> Link:
    return Link(_rounded(link.latency_s), _rounded(link.bytes_per_s))


def _rounded(value: float) -> float:
    """Keep three digits: no measurement here is better, and people read the file."""
    return float(f"{value:.3g}")


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def available_bytes() -> int:
    """Return the memory that programs can still get on this host, or in this container."""
    info = Path("/proc/meminfo")
    lines = info.read_text(encoding="ascii").splitlines() if info.is_file() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    left = [limit - int((_GROUP / "memory.current").read_text(encoding="ascii")) for limit in _group_limits()]
    return min([installed_bytes(), *available, *left])


def installed_bytes() -> int:
    """Return the memory of this host, or the limit of this container."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_group_limits()])


_GROUP = Path("/sys/fs/cgroup")  # control group (version 2) of this process


def _group_limits() -> list[int]:
    limit = _GROUP / "memory.max"
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return [] if text == "max" else [int(text)]
