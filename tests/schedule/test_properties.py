"""Laws under random layouts, times and messages: nothing deadlocks, nothing is left, times and orders agree."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest

from benchmarks.closed_forms import chain
from lightning_pipe.core.program import Bucket, Compute, Edge, Layout, Send, Traffic
from lightning_pipe.schedule import SCHEDULES, order_of
from lightning_pipe.schedule.construct.layout_shapes import both_ways
from lightning_pipe.schedule.construct.stage_times import ChainTimes
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, memory_curves, simulate


@dataclass(frozen=True)
class Random(UnitPrices):
    """Prices of every compute and message, drawn when they are asked for, the same for the same name."""

    seed: int = 0

    def compute_s(self, compute, rank, samples):
        return samples * random.Random(f"{self.seed} {compute} {rank}").uniform(0.1, 3.0)

    def transfer_s(self, message, sender, receiver):
        return random.Random(f"{self.seed} {message} {sender} {receiver}").choice((0.0, 0.2, 4.0))


def some_times(rng: random.Random, layout: Layout) -> ChainTimes:
    stages = len(layout.stages)

    def draw(count: int, low: float, high: float) -> tuple[float, ...]:
        return tuple(rng.uniform(low, high) for _ in range(count))

    return ChainTimes(
        forward_s=draw(stages, 0.1, 3),
        input_s=draw(stages, 0.1, 3),
        weight_s=draw(stages, 0.1, 3),
        ahead_s=draw(stages - 1, 0, 2),
        back_s=draw(stages - 1, 0, 2),
        saved_bytes=draw(stages, 1, 3),
        kept_bytes=draw(stages, 0.1, 1),
        room_bytes=draw(layout.ranks, 1, 30),
    )


def some_layout(rng: random.Random, name: str) -> Layout:
    """A row of devices in any order of ranks, some of them groups of replicas where the shape allows that."""
    if SCHEDULES[name].shape is both_ways:
        counts = [1] * rng.choice((2, 4, 6))
    else:
        counts = [rng.choice((1, 1, 1, 2, 3)) for _ in range(rng.randint(1, 5))]
    ranks = rng.sample(range(sum(counts)), sum(counts))
    devices = [tuple(ranks.pop() for _ in range(count)) for count in counts]
    return SCHEDULES[name].layout(devices, rng.choice(SCHEDULES[name].stages_per_device))


def some_traffic(rng: random.Random, stages: int) -> Traffic:
    """A chain with skips, some of them with gradients, tied weights, and late stages that read the batch."""
    plain = chain(stages)
    pairs = [(a, b) for a in range(stages) for b in range(a + 2, stages)]
    skips = rng.sample(pairs, min(len(pairs), rng.randint(0, 2)))
    edges = [Edge("F", a, b, 1.0) for a, b in skips] + [Edge("B", b, a, 1.0) for a, b in skips if rng.random() < 0.5]
    tied = [Bucket((0, stages - 1), 9)] if stages > 1 and rng.random() < 0.5 else []
    return Traffic((*plain.edges, *edges), (*tied, *plain.buckets), tuple(dict.fromkeys((0, stages - 1))))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "milp"])
def test_whatever_is_drawn_runs_to_its_end(name, seed):
    """`verify` proves that all messages match and nothing waits for ever; the simulator agrees, in any time.

    Orders that split backwards themselves may keep W for long, so their gradients always leave before it.
    """
    rng = random.Random(f"{name} {seed}")
    layout, m = some_layout(rng, name), rng.randint(1, 9)
    order = order_of(name, layout=layout, microbatches=m, times=some_times(rng, layout))
    sizes = tuple(rng.randint(1, 5) for _ in range(m))
    traffic = some_traffic(rng, len(layout.stages))
    splits = any(compute.kind == "I" for line in order for compute in line)
    early = splits or rng.random() < 0.7
    program = verify(lower(order, layout=layout, sizes=sizes, traffic=traffic, early_release=early))
    prices = Random(saved=3, seed=seed)
    timeline = simulate(program, prices)
    for rank, line in enumerate(program.ranks):
        events = timeline.computes(rank)
        assert [event.instruction for event in events] == [x for x in line if isinstance(x, Compute)]
        assert all(a.end <= b.start for a, b in itertools.pairwise(events))
    sent = [event for event in timeline.events if isinstance(event.instruction, Send)]
    assert len(sent) == sum(isinstance(x, Send) for line in program.ranks for x in line)
    for curve in memory_curves(timeline, program=program, prices=prices):
        assert curve.in_flight[-1:] in ((), (0,)) and curve.held_bytes[-1:] in ((), (0,)), "something is left"
