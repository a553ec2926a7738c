"""Cluster files: YAML with units, written by people; what is saved is read back equal.

hosts:
- name: server
  count: 2                                                    # this many equal hosts: server-0, server-1
  devices: [{kind: V100, count: 8, memory: 16 GiB, speed: 1.0, rates: {memory: 720 GB/s, tflops: {float32: 12}},
    runtime: {compute: 10 us, message: 20 us}}]                 # assumed overhead of plans; optional
  inside: {latency: 5 us, bandwidth: 40 GB/s}                 # needed by more than one device
  network: {latency: 30 us, bandwidth: 25 Gbit/s}             # needed by more than one host
  swap: {latency: 10 us, bandwidth: 12 GB/s}                  # to the host's memory; optional
links:                                                        # measured; optional
- {sender: 0, receiver: 8, latency: 40 us, bandwidth: 20 Gbit/s}
reductions:                                                   # measured; optional
- {ranks: [0, 1], latency: 20 us, bandwidth: 30 GB/s, small: {latency: 8 us, bandwidth: 9 GB/s}}
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import TypeVar

import yaml

from lightning_pipe.core.cluster import (
    NO_LINK,
    NO_SWAP,
    Cluster,
    Device,
    Host,
    Link,
    PairLink,
    Rates,
    Reduction,
    RuntimeOverhead,
)
from lightning_pipe.core.serial import from_yaml
from lightning_pipe.errors import ClusterError, ConfigError, PlanError
from lightning_pipe.foreign_names import expected_names
from lightning_pipe.units import parse_bytes, parse_rate, parse_seconds, spell_bytes, spell_rate, spell_seconds

_CLOSE = 0.6  # least likeness of a misspelt preset
Amount = str | int | float  # a number without unit is let through by the schema, so that the error can ask for one


@dataclass(frozen=True)
class LinkEntry:
    """A link, in the words of the file."""

    latency: Amount
    bandwidth: Amount


@dataclass(frozen=True)
class RatesEntry:
    """What a device reaches, in the words of the file: memory, and 10^12 operations per second by type of numbers.

    `peak` are those of the data sheet.
    """

    memory: Amount
    tflops: dict[str, float]
    operation: Amount = "5 us"
    peak: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RuntimeEntry:
    """What the runtime adds to a compute of a stage, and to a message, in the words of the file."""

    compute: Amount
    message: Amount


@dataclass(frozen=True)
class DeviceEntry:
    """Equal devices of a host."""

    kind: str
    memory: Amount
    count: int = 1
    speed: float = 1.0
    rates: RatesEntry | None = None
    runtime: RuntimeEntry | None = None


@dataclass(frozen=True)
class HostEntry:
    """Equal hosts."""

    name: str
    devices: tuple[DeviceEntry, ...]
    count: int = 1
    inside: LinkEntry | None = None
    network: LinkEntry | None = None
    swap: LinkEntry | None = None


@dataclass(frozen=True)
class PairEntry:
    """A measured link."""

    sender: int
    receiver: int
    latency: Amount
    bandwidth: Amount


@dataclass(frozen=True)
class ReductionEntry:
    """A measured all-reduce; `small` is optional, for few bytes."""

    ranks: tuple[int, ...]
    latency: Amount
    bandwidth: Amount
    small: LinkEntry | None = None


@dataclass(frozen=True)
class ClusterEntry:
    """The whole file."""

    hosts: tuple[HostEntry, ...]
    links: tuple[PairEntry, ...] = ()
    reductions: tuple[ReductionEntry, ...] = ()


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a YAML file.

    Raises:
        ClusterError: if the file cannot be read, or something in it is missing, unknown or cannot be.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read {path}: {error}") from None
    return cluster_from_text(text, source=str(path))


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster to a YAML file, from which `load_cluster` reads an equal one."""
    Path(path).write_text(cluster_to_text(cluster), encoding="utf-8")


def cluster_from_text(text: str, *, source: str = "the text") -> Cluster:
    """Return the cluster that a YAML text describes.

    Args:
        text: the content of a cluster file.
        source: its name in errors.

    Raises:
        ClusterError: if something in it is missing, unknown, of the wrong type or cannot be.
    """
    if all(line.lstrip()[:1] in ("", "#") for line in text.splitlines()):
        raise ClusterError(f"{source} is empty; expected `hosts:`, a list of machines with their devices and links.")
    try:
        entry = from_yaml(ClusterEntry, text, source=source)
    except PlanError as error:
        raise ClusterError(str(error)) from None
    try:
        return _cluster(entry)
    except ClusterError as error:
        raise ClusterError(f"{source}: {error}") from None


def cluster_to_text(cluster: Cluster) -> str:
    """Return a cluster as YAML text, from which `cluster_from_text` makes an equal one."""
    entry = ClusterEntry(
        hosts=tuple(_host_entry(host) for host in cluster.hosts),
        links=tuple(
            PairEntry(pair.sender, pair.receiver, *_amounts(pair.link.latency_s, pair.link.bytes_per_s))
            for pair in cluster.links
        ),
        reductions=tuple(
            ReductionEntry(found.ranks, *_amounts(found.latency_s, found.bytes_per_s), _link_entry(found.small))
            for found in cluster.reductions
        ),
    )
    return yaml.safe_dump(_sparse(entry), sort_keys=False, default_flow_style=None, width=120)


def preset_names(presets: Path) -> tuple[str, ...]:
    """List the clusters that come with the package; `presets` is their directory."""
    return tuple(sorted(path.stem for path in presets.glob("*.yaml")))


def find_cluster(name: str, *, presets: Path) -> Cluster:
    """Return the preset of this name, or the cluster in the file of this path.

    Args:
        name: the name of a preset, or the path of a cluster file.
        presets: directory of the presets.

    Raises:
        ClusterError: if there is neither, or the file cannot be read.
    """
    names = preset_names(presets)
    if name in names:
        return load_cluster(presets / f"{name}.yaml")
    if Path(name).is_file():
        return load_cluster(name)
    expected = expected_names(name, names, words="the path of a cluster file or one of", close=_CLOSE)
    raise ClusterError(f"found neither a preset nor a file named {name!r}; {expected}")


def check_ranks(cluster: Cluster, ranks: int, *, source: str) -> None:
    """Refuse a cluster that has not as many devices as the trainer has ranks.

    Args:
        cluster: the cluster.
        ranks: number of ranks of the trainer.
        source: name of the cluster in the error.

    Raises:
        ClusterError: if the numbers differ.
    """
    if cluster.ranks != ranks:
        raise ClusterError(
            f"{source} has {cluster.ranks} devices on {len(cluster.hosts)} hosts, but the trainer has {ranks} ranks "
            "(num_nodes times devices); expected as many. Change either, or leave the cluster out to have it measured."
        )


def _cluster(entry: ClusterEntry) -> Cluster:
    cluster = Cluster(_hosts(entry.hosts))
    links = tuple(_pair(pair, path, cluster.ranks) for path, pair in _numbered("links", entry.links))
    reductions = tuple(_reduction(one, path, cluster.ranks) for path, one in _numbered("reductions", entry.reductions))
    _refuse_doubles("links", [f"the link from {pair.sender} to {pair.receiver}" for pair in links])
    _refuse_doubles("reductions", [f"ranks {list(one.ranks)}" for one in reductions])
    return dataclasses.replace(cluster, links=links, reductions=reductions)


_MOST = 4096  # equal hosts, and equal devices of a host


def _hosts(entries: Sequence[HostEntry]) -> tuple[Host, ...]:
    _require(bool(entries), "hosts", "no host", "at least one, such as {name: a, devices: [...]}")
    for path, entry in _numbered("hosts", entries):
        _require(1 <= entry.count <= _MOST, f"{path}.count", entry.count, f"1 to {_MOST}")
    several = sum(entry.count for entry in entries) > 1
    hosts = tuple(
        dataclasses.replace(host, name=name)
        for path, entry in _numbered("hosts", entries)
        for host in [_host(entry, path, several=several)]
        for name in ([f"{entry.name}-{i}" for i in range(entry.count)] if entry.count > 1 else [entry.name])
    )
    _refuse_doubles("hosts", [f"the name {host.name!r}" for host in hosts])
    return hosts


def _host(entry: HostEntry, path: str, *, several: bool) -> Host:
    example = "{kind: V100, count: 8, memory: 16 GiB}"
    _require(bool(entry.devices), f"{path}.devices", "no device", f"at least one, such as {example}")
    devices = tuple(device for at, one in _numbered(f"{path}.devices", entry.devices) for device in _devices(one, at))
    inside = _link_of(entry.inside, f"{path}.inside", f"{len(devices)} devices" if len(devices) > 1 else "")
    network = _link_of(entry.network, f"{path}.network", "more than one host" if several else "")
    swap = NO_SWAP if entry.swap is None else _link(entry.swap.latency, entry.swap.bandwidth, f"{path}.swap")
    return Host(entry.name, devices, inside, network, swap)


def _devices(entry: DeviceEntry, path: str) -> list[Device]:
    _require(1 <= entry.count <= _MOST, f"{path}.count", entry.count, f"1 to {_MOST}; leave out what there is none of")
    _require(0 < entry.speed < math.inf, f"{path}.speed", entry.speed, "a number above 0; 1 is the profiled device")
    memory = round(_amount(parse_bytes, entry.memory, f"{path}.memory"))
    _require(memory > 0, f"{path}.memory", repr(entry.memory), "more than 0, what a rank may use, such as '16 GiB'")
    rates = None if entry.rates is None else _rates(entry.rates, f"{path}.rates")
    runtime = None if entry.runtime is None else _runtime(entry.runtime, f"{path}.runtime")
    return [Device(entry.kind, memory, entry.speed, rates, runtime=runtime)] * entry.count


def _runtime(entry: RuntimeEntry, path: str) -> RuntimeOverhead:
    compute_s, message_s = (
        _amount(parse_seconds, getattr(entry, key), f"{path}.{key}") for key in ("compute", "message")
    )
    return RuntimeOverhead(compute_s, message_s)


def _rates(entry: RatesEntry, path: str) -> Rates:
    memory = _amount(parse_rate, entry.memory, f"{path}.memory")
    _require(0 < memory < math.inf, f"{path}.memory", repr(entry.memory), "more than 0, such as '1.5 TB/s'")
    _require(bool(entry.tflops), f"{path}.tflops", "nothing", "at least one, such as {float32: 15, bfloat16: 180}")
    operation_s = _amount(parse_seconds, entry.operation, f"{path}.operation")
    flops, peak = (_flops(getattr(entry, key), f"{path}.{key}") for key in ("tflops", "peak"))
    return Rates(memory, flops, operation_s, peak)


def _flops(entry: Mapping[str, float], path: str) -> tuple[tuple[str, float], ...]:
    for name, rate in entry.items():
        _require(0 < rate < math.inf, f"{path}.{name}", rate, "more than 0, in 10^12 operations per second")
    return tuple((name, rate * 1e12) for name, rate in entry.items())


def _link_of(entry: LinkEntry | None, path: str, needed_by: str) -> Link:
    """Return the link of an entry; it may be missing where nobody needs it."""
    if entry is not None:
        return _link(entry.latency, entry.bandwidth, path)
    example = "{latency: 30 us, bandwidth: 25 Gbit/s}"
    _require(not needed_by, path, "no link", f"one, for there are {needed_by} that must reach each other: {example}")
    return NO_LINK


def _link(latency: Amount, bandwidth: Amount, path: str) -> Link:
    seconds = _amount(parse_seconds, latency, f"{path}.latency")
    rate = _amount(parse_rate, bandwidth, f"{path}.bandwidth")
    _require(0 < rate < math.inf, f"{path}.bandwidth", repr(bandwidth), "more than 0, such as '25 Gbit/s' or '12 GB/s'")
    return Link(seconds, rate)


def _amount(parse: Callable[[str], float], amount: Amount, path: str) -> float:
    try:
        return parse(str(amount))
    except ConfigError as error:
        raise ClusterError(f"{path}: {error}") from None


def _pair(entry: PairEntry, path: str, ranks: int) -> PairLink:
    _require_ranks((entry.sender, entry.receiver), path, ranks)
    itself = entry.sender == entry.receiver
    _require(not itself, path, f"a link from rank {entry.sender} to itself", "two different ranks")
    return PairLink(entry.sender, entry.receiver, _link(entry.latency, entry.bandwidth, path))


def _reduction(entry: ReductionEntry, path: str, ranks: int) -> Reduction:
    _require_ranks(entry.ranks, f"{path}.ranks", ranks)
    rising = len(entry.ranks) > 1 and list(entry.ranks) == sorted(set(entry.ranks))
    _require(rising, f"{path}.ranks", list(entry.ranks), "two or more different ranks in rising order")
    link = _link(entry.latency, entry.bandwidth, path)
    few = entry.small
    small = None if few is None else _link(few.latency, few.bandwidth, f"{path}.small")
    return Reduction(entry.ranks, link.latency_s, link.bytes_per_s, small)


def _require_ranks(found: Sequence[int], path: str, ranks: int) -> None:
    for rank in found:
        _require(0 <= rank < ranks, path, f"rank {rank}", f"ranks from 0 to {ranks - 1}, counted host by host")


def _refuse_doubles(path: str, names: Sequence[str]) -> None:
    for name, times in Counter(names).items():
        _require(times == 1, path, f"{name} {times} times", "each once; remove or rename the others")


def _require(holds: bool, path: str, found: object, expected: str) -> None:
    if not holds:
        raise ClusterError(f"{path}: found {found}; expected {expected}")


_E = TypeVar("_E")


def _numbered(path: str, entries: Sequence[_E]) -> Iterator[tuple[str, _E]]:
    return ((f"{path}[{number}]", entry) for number, entry in enumerate(entries))


def _host_entry(host: Host) -> HostEntry:
    devices = tuple(
        DeviceEntry(
            device.kind,
            spell_bytes(device.memory_bytes),
            len(list(equal)),
            device.speed,
            _rates_entry(device.rates),
            _runtime_entry(device.runtime),
        )
        for device, equal in itertools.groupby(host.devices)
    )
    inside, network = (_link_entry(link, absent=NO_LINK) for link in (host.inside, host.network))
    return HostEntry(host.name, devices, inside=inside, network=network, swap=_link_entry(host.swap, absent=NO_SWAP))


def _rates_entry(rates: Rates | None) -> RatesEntry | None:
    if rates is None:
        return None
    tflops, peak = ({n: rate / 1e12 for n, rate in found} for found in (rates.flops_per_s, rates.peak_flops_per_s))
    return RatesEntry(spell_rate(rates.memory_bytes_per_s), tflops, spell_seconds(rates.operation_s), peak)


def _runtime_entry(runtime: RuntimeOverhead | None) -> RuntimeEntry | None:
    if runtime is None:
        return None
    return RuntimeEntry(spell_seconds(runtime.compute_s), spell_seconds(runtime.message_s))


def _link_entry(link: Link | None, *, absent: Link | None = None) -> LinkEntry | None:
    return None if link is None or link == absent else LinkEntry(*_amounts(link.latency_s, link.bytes_per_s))


def _amounts(latency_s: float, bytes_per_s: float) -> tuple[str, str]:
    return spell_seconds(latency_s), spell_rate(bytes_per_s)


def _sparse(value: object) -> object:
    """Return dataclasses as nested dictionaries and lists without what has its default."""
    if isinstance(value, tuple):
        return [_sparse(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    written = ((part, getattr(value, part.name)) for part in dataclasses.fields(value))
    return {part.name: _sparse(item) for part, item in written if item != _default(part)}


def _default(part: dataclasses.Field[object]) -> object:
    return part.default if part.default_factory is MISSING else part.default_factory()
