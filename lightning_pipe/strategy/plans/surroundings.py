"""What a step costs beside its operations: devices, links, the runtime and the optimizer, measured once a day.

All ranks measure together, in about a second. What they measured is kept in the cache, on rank 0, for a day: noise
would lead the next start of the same module to another plan, and so to another check before training. A start finds it
if everything is as it was that such costs depend on:

    every rank's host and device, the device's settings, versions, the transport, where offloaded tensors go, and class,
    options and parameters of the optimizer

Memory that is free is looked at every time, and a few messages tell whether links are still what they were. A run whose
computes turn out otherwise drops what is kept (`stale_times`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch.optim import Optimizer

from lightning_pipe import cache_files
from lightning_pipe.core.profile import OptimizerProfile
from lightning_pipe.core.serial import from_dict, to_dict
from lightning_pipe.profiler.cache import conditions, digest, folder_under_load
from lightning_pipe.profiler.devices import (
    DeviceFacts,
    benchmark,
    capacity_bytes,
    describe_capacity,
    describe_device,
    hosts_of,
    overhead_bytes,
)
from lightning_pipe.profiler.network.host_copies import measure_swap
from lightning_pipe.profiler.network.link_probe import (
    LinkFacts,
    ProbeHandle,
    links_hold,
    open_for_check,
    open_for_probe,
    probe_links,
)
from lightning_pipe.profiler.optimizer import profile_optimizer
from lightning_pipe.profiler.processor_time import is_loaded
from lightning_pipe.runtime.activations.protocol import HostStore
from lightning_pipe.runtime.activations.trip import trip_s
from lightning_pipe.runtime.waiting import Wait
from lightning_pipe.strategy.plans.runtime_overhead import Rehearsed, rehearse
from lightning_pipe.strategy.ranks.connections import Connections

T = TypeVar("T")
log = logging.getLogger(__name__)

_FORMAT = 7  # raised when what is measured changes
_LASTS_S = 24 * 3600.0
_OF_NETWORK = ("GLOO_", "NCCL_", "MASTER_ADDR")  # variables of the environment that decide how ranks are connected


@dataclass(frozen=True)
class Surroundings:
    """Costs beside those of operations.

    Attributes:
        facts: of every rank's device.
        links: between the ranks.
        runtime: of computes and messages, besides.
        optimizer: of a step.
    """

    facts: tuple[DeviceFacts, ...]
    links: LinkFacts
    runtime: Rehearsed
    optimizer: OptimizerProfile


class SurroundingsProbe:
    """Measure the surroundings, or find what was measured before.

    Args:
        cache: folder of rank 0; None keeps nothing.
        links: to the other ranks.
        device: where this rank computes.
        host: where it offloads to.

    Attributes:
        is_loaded: whether other work takes a part of the processor, and something was measured so before.
    """

    def __init__(self, cache: Path | None, links: Connections, *, device: torch.device, host: HostStore) -> None:
        self._cache, self._links, self._device, self._host = cache, links, device, host
        self.is_loaded = False

    def measure(self, optimizers: Sequence[Optimizer]) -> Surroundings:
        """Return what was measured, on all ranks; called by all together.

        Args:
            optimizers: of this rank; there is one at most. Rank 0's counts.
        """
        control = self._links.control
        mine = describe_device(self._device, host=socket.gethostname(), benchmark_s=0.0)
        facts = self._gathered(mine, "the devices")
        self.is_loaded = self._has_load(facts)
        known = self._known(facts, optimizers) if control.rank == 0 else None
        known = control.broadcast(known, source=0, what="what was measured of devices and links before")
        if known is not None and not self._holds(known.links, hosts_of(facts)):
            log.info("Messages between ranks take otherwise than when links were measured; they are measured again.")
            known = None
            for path in self._paths(facts, optimizers) if control.rank == 0 else ():
                with contextlib.suppress(OSError):
                    path.unlink()
        if known is not None:
            both = zip(facts, known.facts, strict=True)
            return replace(
                known, facts=tuple(replace(old, memory=new.memory, memory_bytes=new.memory_bytes) for new, old in both)
            )
        with torch.inference_mode(False):
            swap = measure_swap(lambda count: trip_s(self._host, count, device=self._device))
        transport, hosts = self._links.transport, hosts_of(facts)
        with self._links.watch.opening("the connections that are measured"):
            open_for_probe(transport, hosts=hosts)
        links = probe_links(transport, hosts=hosts, device=self._device, wait=self._wait)
        runtime = rehearse(self._links, self._device)
        mine = replace(mine, benchmark_s=benchmark(self._device), swap=swap, overhead_bytes=self._overhead_bytes(mine))
        facts = self._gathered(mine, "the devices")
        step = profile_optimizer(optimizers[0], device=self._device) if optimizers else OptimizerProfile()
        found = None if runtime is None else Surroundings(tuple(facts), links, runtime, step)
        found = control.broadcast(found, source=0, what="what was measured of devices and links")
        assert found is not None, "rank 0 has heard the rehearsal"
        return found

    def _holds(self, facts: LinkFacts, hosts: Sequence[int]) -> bool:
        """Return on all ranks whether links are what was measured of them."""
        transport = self._links.transport
        with self._links.watch.opening("the connections that are measured"):
            open_for_check(transport, facts.links, hosts=hosts)
        return links_hold(transport, facts.links, hosts=hosts, device=self._device, wait=self._wait)

    def memory_bytes(self) -> int:
        """Return what each rank may use of its memory, whatever else runs: the least of all ranks, on all ranks."""
        mine = describe_capacity(self._device, host=socket.gethostname())
        return capacity_bytes(self._gathered(mine, "the memory of the devices"))

    def _overhead_bytes(self, before: DeviceFacts) -> int:
        """Return what communicators and libraries of this rank take; no communicator is open then."""
        transport = self._links.transport
        transport.trim()
        after = describe_device(self._device, host=before.host, benchmark_s=0.0)
        size, ranks = transport.communicator_bytes, self._links.control.ranks
        return overhead_bytes(before, after, communicator_bytes=size, ranks=ranks)

    def _has_load(self, facts: Sequence[DeviceFacts]) -> bool:
        """Return whether other work takes processors of some rank now, if something was measured so before."""
        control = self._links.control
        is_asked = control.rank == 0 and self._cache is not None and folder_under_load(self._cache).exists()
        if not control.sum(torch.tensor(float(is_asked)), what="whether something was measured under load"):
            return False
        here = sum(fact.host == facts[control.rank].host for fact in facts)
        loaded = torch.tensor(float(is_loaded(ranks=here, device=self._device)))
        return bool(control.sum(loaded, what="whether other work takes processors"))

    def _known(self, facts: Sequence[DeviceFacts], optimizers: Sequence[Optimizer]) -> Surroundings | None:
        return next((known for path in self._paths(facts, optimizers) if (known := _load(path)) is not None), None)

    def _paths(self, facts: Sequence[DeviceFacts], optimizers: Sequence[Optimizer]) -> list[Path]:
        """Return where rank 0 may find what was measured."""
        paths = [self._path(facts, optimizers, is_loaded=of_load) for of_load in sorted({False, self.is_loaded})]
        return [path for path in paths if path is not None]

    def keep(self, found: Surroundings, optimizers: Sequence[Optimizer], *, is_disturbed: bool) -> None:
        """Keep what was measured, on rank 0; apart from the rest if other work took a part of the processor."""
        path = self._path(found.facts, optimizers, is_loaded=is_disturbed or self.is_loaded)
        if path is not None and not path.exists():
            content = json.dumps(to_dict(_Measured(time.time(), found)))
            cache_files.write(path, content.encode(), version=_FORMAT)

    def _path(
        self, facts: Sequence[DeviceFacts], optimizers: Sequence[Optimizer], *, is_loaded: bool = False
    ) -> Path | None:
        if self._cache is None:
            return None
        network = {name: value for name, value in os.environ.items() if name.startswith(_OF_NETWORK)}
        asked = {
            "format": _FORMAT,
            "ranks": [[fact.host, fact.kind, fact.memory] for fact in facts],
            "conditions": conditions(self._device),
            "transport": [type(self._links.transport).__name__, type(self._host).__name__, network],
            "optimizer": [_described(optimizer) for optimizer in optimizers],
        }
        folder = folder_of(folder_under_load(self._cache) if is_loaded else self._cache)
        return folder / f"{digest(json.dumps(asked, sort_keys=True))}.json"

    def _wait(self, handle: ProbeHandle, what: str) -> None:
        self._links.watch.wait(Wait(handle, what))

    def _gathered(self, mine: T, what: str) -> list[T]:
        """Return the values of all ranks, by rank, on all ranks."""
        control = self._links.control
        told = [control.to_first(mine, source=rank, what=what) for rank in range(control.ranks)]
        return control.broadcast([value for value in told if value is not None], source=0, what=what)


def folder_of(cache: Path) -> Path:
    """Return where measurements of surroundings are kept."""
    return cache / "surroundings"


def forget_surroundings(cache: Path) -> bool:
    """Delete what is kept, which is measured again when it is needed; return whether there was anything."""
    files = [file for of in (cache, folder_under_load(cache)) for file in folder_of(of).glob("*.json")]
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
    return bool(files)


@dataclass(frozen=True)
class _Measured:
    """A file of surroundings; `time_s` is when they were measured, in seconds since 1970."""

    time_s: float
    surroundings: Surroundings

    @classmethod
    def parsed(cls, content: bytes) -> _Measured:
        return from_dict(cls, json.loads(content))


def _load(path: Path) -> Surroundings | None:
    """Return what is kept in a file of today; None if there is none, or none that can be used."""
    known = cache_files.read(path, _Measured.parsed, version=_FORMAT)
    if known is None:
        return None
    if not 0 <= time.time() - known.time_s < _LASTS_S:
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    log.info(
        "Devices, links and the optimizer cost what was measured at %s (kept for a day; cache=off measures again).",
        time.strftime("%H:%M", time.localtime(known.time_s)),
    )
    return known.surroundings


def _described(optimizer: Optimizer) -> list[object]:
    forms = sorted((str(p.dtype), p.numel()) for group in optimizer.param_groups for p in group["params"])
    return [f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", repr(optimizer.defaults), forms]
