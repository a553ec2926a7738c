"""Analytic profile: seconds per operation on a device that is not here, counted instead of measured.

    seconds = start of an operation + flops / rate of their type of numbers + bytes touched / memory bandwidth

They are added, not overlapped as in the roofline model (Williams, Waterman and Patterson, 2009), so no operation is
cheaper than any of them; a view takes no time. Flops are taken in proportion to the samples where the operation touches
samples at all, bytes as the sizes of what it reads and makes say. The nominal device is one core of a present CPU;
other rates are those of the devices of a cluster. Between operators of equal counts real devices differ by factors:
good for balance, not for prediction.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_pipe.core.cluster import Cluster, Device, Rates
from lightning_pipe.core.graph import Graph, Operation
from lightning_pipe.core.profile import Profile

NOMINAL = Rates(
    memory_bytes_per_s=10e9,  # that one core reaches
    flops_per_s=(("float32", 100e9),),  # 10 per byte; present CPUs have 5-20, GPUs about 100
    operation_s=5e-6,  # dispatch in eager mode
)


def counted(graph: Graph, rates: Rates = NOMINAL, *, device: str = "nominal") -> Profile:
    """Return the profile of a graph on a device with these rates; `device` is its name."""
    sizes = (1, max(2, graph.samples))  # two points make the line that the formula is
    makes: list[list[int]] = [[] for _ in graph.operations]
    for t, tensor in enumerate(graph.tensors):
        if tensor.maker >= 0:
            makes[tensor.maker].append(t)
    seconds = tuple(
        tuple(_seconds(operation, graph, made, samples, rates) for samples in sizes)
        for operation, made in zip(graph.operations, makes, strict=True)
    )
    return Profile(graph.fingerprint, device, sizes, seconds, source="counted")


def head_s(graph: Graph, profile: Profile, samples: int) -> float:
    """Return the seconds of the head of a step, which no profile measures; 0 if it has none.

    Its operations are counted on the nominal device; that is as far from the truth as it is for all others together.
    """
    head = graph.head
    if head is None:
        return 0.0
    touched_s = head.touched_bytes / NOMINAL.memory_bytes_per_s
    nominal_s = head.operations * NOMINAL.operation_s + head.flops / NOMINAL.flops_of("") + touched_s
    counted_s = sum(row[-1] for row in counted(graph).seconds)
    whole_s = sum(profile.operation_s(o, graph.samples) for o in range(len(graph.operations)))
    return nominal_s * (whole_s / counted_s if counted_s else 1.0) * samples / head.samples


def counted_on(graph: Graph, cluster: Cluster) -> tuple[Profile, Cluster]:
    """Return the profile of a graph on the first device whose rates are known, and the cluster with speeds to match.

    Operations have one speed per device in plans, so what devices differ in compute and in memory is weighed as this
    graph needs them: the speed of a device is how many times quicker it runs all of the graph. Devices without rates
    keep their speed; if none has rates, costs are those of the nominal device.
    """
    known = {device: None for host in cluster.hosts for device in host.devices if device.rates is not None}
    if not known:
        return counted(graph), cluster
    profiles = {device: counted(graph, device.rates or NOMINAL, device=device.kind) for device in known}
    profile = next(iter(profiles.values()))
    whole_s = {device: sum(row[-1] for row in found.seconds) for device, found in profiles.items()}
    first_s = next(iter(whole_s.values()))

    def relative(device: Device) -> Device:
        found = whole_s.get(device)
        return replace(device, speed=first_s / found) if found else device

    hosts = (replace(host, devices=tuple(map(relative, host.devices))) for host in cluster.hosts)
    return profile, replace(cluster, hosts=tuple(hosts))


def _seconds(operation: Operation, graph: Graph, made: list[int], samples: int, rates: Rates) -> float:
    if operation.view:
        return 0.0
    per_sample = sum(graph.tensors[t].bytes_per_sample for t in (*operation.reads, *made))
    touched = max(0.0, operation.touched_bytes + per_sample * (samples - graph.samples))
    flops = operation.flops * (samples / graph.samples if per_sample else 1.0)
    computing_s = flops / rates.flops_of(operation.dtype)
    return rates.operation_s + computing_s + touched / rates.memory_bytes_per_s
