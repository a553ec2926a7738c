"""Simulated runs for tests of reports, and the same runs as if they had been recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_pipe.core.program import (
    Bucket,
    Compute,
    Edge,
    Layout,
    Message,
    Recv,
    Reduce,
    Send,
    Traffic,
    VerifiedProgram,
)
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.orders.forward_only import forward_only
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, simulate

LAYOUTS = [((0,), (1,), (2,)), ((0, 1), (2,)), ((0,), (1,), (0,)), ((0,), (1, 2), (3,)), ((0, 1),)]


@dataclass(frozen=True)
class Shaped(UnitPrices):
    """Unit prices with exceptions: factors by (stage, kind) and by rank, and seconds by (sender, receiver)."""

    factors: Mapping[tuple[int, str], float] = field(default_factory=dict)
    ranks: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def compute_s(self, compute: Compute, rank: int, samples: int) -> float:
        factor = self.factors.get((compute.stage, compute.kind), 1.0) * self.ranks.get(rank, 1.0)
        return super().compute_s(compute, rank, samples) * factor

    def transfer_s(self, message: Message, sender: int, receiver: int) -> float:
        return self.links.get((sender, receiver), self.latency)


def program_of(
    stages: tuple[tuple[int, ...], ...],
    *,
    microbatches: int = 4,
    schedule: str = "1f1b",
    training: bool = True,
    offloads: tuple[int, ...] = (),
) -> VerifiedProgram:
    layout = Layout(stages)
    edges = [e for s in range(len(stages) - 1) for e in (Edge("F", s, s + 1, 1.0), Edge("B", s + 1, s, 1.0))]
    traffic = Traffic(tuple(edges), tuple(Bucket((s,), 1) for s in range(len(stages))), offloads=offloads)
    order = (
        order_of(schedule, layout=layout, microbatches=microbatches) if training else forward_only(layout, microbatches)
    )
    return verify(lower(order, layout=layout, sizes=(6,) * microbatches, traffic=traffic, training=training))


def run_of(stages: tuple[tuple[int, ...], ...], prices: UnitPrices, **options: object) -> Timeline:
    return simulate(program_of(stages, **options), prices)  # type: ignore[arg-type]


def as_recorded(timeline: Timeline, *, posted: float = 0.0) -> Timeline:
    """Return what a recorder would have seen: receives since they were posted, sends as moments."""

    def seen(event: Event) -> Event:
        match event.instruction:
            case Recv():
                return replace(event, start=min(posted, event.start))
            case Send():
                return replace(event, end=event.start)
            case _:
                return event

    return Timeline(tuple(seen(event) for event in timeline.events))


def without_sums(timeline: Timeline) -> Timeline:
    return Timeline(tuple(event for event in timeline.events if not isinstance(event.instruction, Reduce)))
