"""Prices of own work (`core.effects`): what a rank does for one stage and micro-batch without another rank.

Each price is a function of the costs of a plan, so that a new instruction is priced in one place:

    price_own_work(Remake, seconds=lambda costs, work, rank, samples: ...)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from lightning_pipe.core.cluster import Cluster
from lightning_pipe.core.effects import OwnWork, effects_of
from lightning_pipe.core.program import Evict, Fetch, Vacate
from lightning_pipe.errors import PlanError


class OwnWorkCosts(Protocol):
    """What prices of own work are made of."""

    @property
    def cluster(self) -> Cluster:
        """Return the devices and links."""

    def offloaded_bytes(self, stage: int, samples: int) -> int:
        """Return the part of the saved bytes that leaves the device between F and I."""
        ...


Seconds: TypeAlias = Callable[[OwnWorkCosts, OwnWork, int, int], float]  # costs, instruction, rank, samples
Bytes: TypeAlias = Callable[[OwnWorkCosts, OwnWork, int, int], int]


@dataclass(frozen=True)
class OwnWorkPrice:
    """Seconds and bytes of one kind of own work; None where its effects ask for none."""

    seconds: Seconds | None
    bytes: Bytes | None


OWN_WORK_PRICES: dict[type[OwnWork], OwnWorkPrice] = {}


def price_own_work(kind: type[OwnWork], *, seconds: Seconds | None = None, bytes: Bytes | None = None) -> None:
    """Register what a kind of own work costs.

    Args:
        kind: the instruction.
        seconds: for which it occupies its resource.
        bytes: that it holds, or gives up.
    """
    OWN_WORK_PRICES[kind] = OwnWorkPrice(seconds, bytes)


def own_work_s(costs: OwnWorkCosts, work: OwnWork, rank: int, samples: int) -> float:
    """Return the seconds of own work.

    Raises:
        PlanError: if it has no price.
    """
    price = OWN_WORK_PRICES.get(type(work))
    if price is None or price.seconds is None:
        raise _unpriced(work, "seconds")
    return price.seconds(costs, work, rank, samples)


def own_work_bytes(costs: OwnWorkCosts, work: OwnWork, rank: int, samples: int) -> int:
    """Return the bytes that own work holds, or gives up.

    Raises:
        PlanError: if it has no price.
    """
    price = OWN_WORK_PRICES.get(type(work))
    if price is None or price.bytes is None:
        raise _unpriced(work, "bytes")
    return price.bytes(costs, work, rank, samples)


def _unpriced(work: OwnWork, what: str) -> PlanError:
    name = type(work).__name__
    return PlanError(
        f"The instruction {name} ({work}, {effects_of(work).law}) has no price in {what}; "
        f"say it with price_own_work({name}, {what}=...)."
    )


def _copied_s(costs: OwnWorkCosts, work: OwnWork, rank: int, samples: int) -> float:
    """Return the seconds of copying what a stage offloads of a micro-batch to the host, or back."""
    host = costs.cluster.hosts[costs.cluster.host_of(rank)]
    return host.swap.seconds(costs.offloaded_bytes(work.stage, samples))


def _copied_bytes(costs: OwnWorkCosts, work: OwnWork, rank: int, samples: int) -> int:
    return costs.offloaded_bytes(work.stage, samples)


def _waited_s(costs: OwnWorkCosts, work: OwnWork, rank: int, samples: int) -> float:
    """Return nothing: beside waiting for the end of what it follows, it takes no time."""
    return 0.0


for _kind in (Evict, Fetch):
    price_own_work(_kind, seconds=_copied_s, bytes=_copied_bytes)
price_own_work(Vacate, seconds=_waited_s, bytes=_copied_bytes)
