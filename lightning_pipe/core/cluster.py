"""Cluster: devices, hosts and the links between them.

Ranks are numbered host by host, in the order of the file. A host's devices reach each other over `inside`; hosts reach
each other over their network cards, which all devices of a host share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_pipe.errors import ClusterError


@dataclass(frozen=True)
class Link:
    """A connection in one direction: a message of b bytes takes `latency_s + b / bytes_per_s` seconds."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, count: float, *, flows: int = 1) -> float:
        """Return the seconds of a message of `count` bytes while `flows` messages share the bandwidth."""
        return self.latency_s + count * flows / self.bytes_per_s


NO_LINK = Link(latency_s=0.0, bytes_per_s=math.inf)
"""Stands where nothing is ever sent: inside a host with one device, and for the network of the only host."""

NO_SWAP = Link(latency_s=math.inf, bytes_per_s=math.inf)
"""Stands where nothing can be copied to another memory: devices that compute in the host's own."""


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, as far as programs reach it.

    Attributes:
        memory_bytes_per_s: bytes read and written.
        flops_per_s: floating point operations, by the name of the type of the numbers, e.g. `bfloat16`; of a type that
            is not there as many as of the first.
        operation_s: seconds that every operation takes besides, to be started.
        peak_flops_per_s: the same of the device's data sheet, which no program reaches; () if it is not known.
    """

    memory_bytes_per_s: float
    flops_per_s: tuple[tuple[str, float], ...]
    operation_s: float = 5e-6
    peak_flops_per_s: tuple[tuple[str, float], ...] = ()

    def flops_of(self, dtype: str) -> float:
        """Return the floating point operations per second with numbers of a type."""
        return dict(self.flops_per_s).get(dtype, self.flops_per_s[0][1])

    def peak_of(self, dtype: str) -> float:
        """Return the floating point operations per second of the data sheet with numbers of a type; 0 if not known."""
        peaks = self.peak_flops_per_s
        return dict(peaks).get(dtype, peaks[0][1]) if peaks else 0.0


@dataclass(frozen=True)
class RuntimeOverhead:
    """Seconds that a runtime adds: to every compute of a stage, and to every message."""

    compute_s: float
    message_s: float


@dataclass(frozen=True)
class Device:
    """One accelerator (or CPU).

    Attributes:
        kind: name, e.g. `V100`.
        memory_bytes: memory that a rank may use.
        speed: how many times faster than the device that was profiled.
        rates: of what costs are counted by; None if they are not known.
        overhead_bytes: measured memory beside that, which communicators, contexts and libraries take.
        runtime: what the runtime is assumed to add on such a device; None if nothing is assumed.
    """

    kind: str
    memory_bytes: int
    speed: float = 1.0
    rates: Rates | None = None
    overhead_bytes: int = 0
    runtime: RuntimeOverhead | None = None


@dataclass(frozen=True)
class Host:
    """One machine.

    Attributes:
        name: its name.
        devices: its devices.
        inside: between two of its devices.
        network: its network card: latency to another host, and the bandwidth that all its devices share, per direction.
        swap: between the memory of one of its devices and its own, per device and direction.
    """

    name: str
    devices: tuple[Device, ...]
    inside: Link
    network: Link
    swap: Link = NO_SWAP


@dataclass(frozen=True)
class PairLink:
    """A measured link from one rank to another, where it differs from what the hosts say."""

    sender: int
    receiver: int
    link: Link


@dataclass(frozen=True)
class Reduction:
    """A measured all-reduce among these ranks.

    b bytes take `latency_s + b / bytes_per_s` seconds, or what `small` says where that is less: few bytes go another
    way than many (NCCL's LL and Simple), or through faster caches.
    """

    ranks: tuple[int, ...]
    latency_s: float
    bytes_per_s: float
    small: Link | None = None

    @property
    def ways(self) -> tuple[Link, ...]:
        """Return the lines, of which the quickest counts."""
        return (Link(self.latency_s, self.bytes_per_s), *((self.small,) if self.small is not None else ()))


@dataclass(frozen=True)
class Cluster:
    """Devices and links.

    Attributes:
        hosts: the machines.
        links: measured links that take precedence over those of the hosts.
        reductions: measured all-reduces; others follow from the links by formula.
    """

    hosts: tuple[Host, ...]
    links: tuple[PairLink, ...] = ()
    reductions: tuple[Reduction, ...] = ()

    @property
    def overhead_bytes(self) -> int:
        """Return the most that communicators, contexts and libraries take on a device."""
        return max((device.overhead_bytes for host in self.hosts for device in host.devices), default=0)

    @property
    def runtime(self) -> RuntimeOverhead | None:
        """Return the most that the runtime is assumed to add on any device; None if a device does not say it."""
        stated = [device.runtime for host in self.hosts for device in host.devices]
        known = [overhead for overhead in stated if overhead is not None]
        if not known or len(known) < len(stated):
            return None
        return RuntimeOverhead(max(one.compute_s for one in known), max(one.message_s for one in known))

    @property
    def ranks(self) -> int:
        """Count the devices."""
        return len(self._places)

    def device(self, rank: int) -> Device:
        """Return the device of a rank."""
        host, index = self._places[rank]
        return self.hosts[host].devices[index]

    def host_of(self, rank: int) -> int:
        """Return the index of the host of a rank."""
        return self._places[rank][0]

    def link(self, sender: int, receiver: int) -> Link:
        """Return the link from one rank to another."""
        if (sender, receiver) in self._measured:
            return self._measured[sender, receiver]
        here, there = self.hosts[self.host_of(sender)], self.hosts[self.host_of(receiver)]
        if here is there:
            return here.inside
        latency = max(here.network.latency_s, there.network.latency_s)
        return Link(latency, min(here.network.bytes_per_s, there.network.bytes_per_s))

    def reduction(self, ranks: Sequence[int]) -> Reduction | None:
        """Return the all-reduce measured among these ranks, or else among ranks like them; None if there is none.

        Ranks are alike if they are as many, on as many hosts with the same devices. How many of them each host has is
        left out: a ring (or tree) enters and leaves every host once.
        """
        exact = next((found for found in self.reductions if found.ranks == tuple(ranks)), None)
        return exact or self._reductions.get(self._likeness(ranks))

    def _likeness(self, ranks: Sequence[int]) -> tuple[int, tuple[tuple[str, ...], ...]]:
        hosts = {self.host_of(rank) for rank in ranks}
        return len(ranks), tuple(sorted(tuple(device.kind for device in self.hosts[h].devices) for h in hosts))

    @cached_property
    def _reductions(self) -> dict[tuple[int, tuple[tuple[str, ...], ...]], Reduction]:
        return {self._likeness(found.ranks): found for found in reversed(self.reductions)}

    @cached_property
    def _places(self) -> tuple[tuple[int, int], ...]:
        return tuple((h, i) for h, host in enumerate(self.hosts) for i in range(len(host.devices)))

    @cached_property
    def _measured(self) -> dict[tuple[int, int], Link]:
        return {(pair.sender, pair.receiver): pair.link for pair in self.links}


def limited(cluster: Cluster, limits: Mapping[str, int]) -> Cluster:
    """Return a cluster whose devices have no more memory than limits allow.

    Args:
        cluster: the devices as they are; one with less than its limit keeps what it has.
        limits: bytes by a part of a device's kind, upper and lower case alike; "" is in every kind.

    Raises:
        ClusterError: if a limit is for a kind that no device has.
    """

    def most(device: Device) -> Device:
        own = [limit for kind, limit in limits.items() if kind.lower() in device.kind.lower()]
        return replace(device, memory_bytes=min(device.memory_bytes, *own)) if own else device

    kinds = dict.fromkeys(device.kind for host in cluster.hosts for device in host.devices)
    if unknown := [part for part in limits if not any(part.lower() in kind.lower() for kind in kinds)]:
        raise ClusterError(
            f"found a memory limit for {unknown[0]!r}; expected (a part of) one of the kinds of the devices: "
            f"{'; '.join(kinds)}"
        )
    hosts = (replace(host, devices=tuple(most(device) for device in host.devices)) for host in cluster.hosts)
    return replace(cluster, hosts=tuple(hosts))
