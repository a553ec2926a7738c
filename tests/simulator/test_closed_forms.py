"""Laws of the simulator: published closed forms, for every number of stages and micro-batches.

Notation: p stages, m micro-batches, tF tI tW seconds of the computes, tB = tI + tW.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from lightning_pipe.core.program import Bucket, Edge, Layout, Options, Traffic, VerifiedProgram
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verify import verify
from lightning_pipe.simulator import UnitPrices, memory_curves, simulate

GRID = [(p, m) for p in range(2, 9) for m in (1, 2, 3, 8, 17)]
SCHEDULES: list[tuple[str, Options]] = [("gpipe", {}), ("1f1b", {}), ("1f1b", {"warmup": "pb"})]


def pipeline(p: int, m: int, schedule: str, options: Options, *, early_release: bool = True) -> VerifiedProgram:
    """Return the program of p stages on p ranks."""
    layout = Layout(tuple((s,) for s in range(p)))
    edges = [edge for s in range(p - 1) for edge in (Edge("F", s, s + 1, 1.0), Edge("B", s + 1, s, 1.0))]
    traffic = Traffic(tuple(edges), tuple(Bucket((s,), 1) for s in range(p)))
    order = order_of(schedule, layout=layout, microbatches=m, options=options)
    program = lower(order, layout=layout, sizes=(1,) * m, traffic=traffic, early_release=early_release)
    return verify(program)


def some_times() -> list[tuple[float, float, float]]:
    """Return unit times and a few random ones for F, I and W."""
    rng = random.Random(0)
    return [(1.0, 1.0, 1.0), *[tuple(rng.uniform(0.1, 3.0) for _ in range(3)) for _ in range(3)]]


@pytest.mark.parametrize(("schedule", "options"), SCHEDULES)
def test_makespan_with_fused_backward(schedule, options):
    """(m + p - 1)(tF + tB) for any times, if the input gradient leaves at the end of the backward."""
    for p, m in GRID:
        program = pipeline(p, m, schedule, options, early_release=False)
        for times in some_times():
            assert simulate(program, UnitPrices(*times)).makespan == pytest.approx((m + p - 1) * sum(times)), (p, m)


@pytest.mark.parametrize(("schedule", "options"), SCHEDULES)
def test_makespan_with_early_release(schedule, options):
    """(p - 1)(tF + tI) + m (tF + tB) for any times, if the input gradient leaves before the weight gradient."""
    for p, m in GRID:
        program = pipeline(p, m, schedule, options)
        for f, i, w in some_times():
            makespan = simulate(program, UnitPrices(f, i, w)).makespan
            assert makespan == pytest.approx(m * (f + i + w) + (p - 1) * (f + i)), (p, m)


def test_idle_with_flush_is_the_same_on_every_rank():
    for p, m in GRID:
        timeline = simulate(pipeline(p, m, "1f1b", {}), UnitPrices())
        assert {timeline.idle_with_flush(rank) for rank in range(p)} == {2.0 * (p - 1)}


@pytest.mark.parametrize(
    ("schedule", "options", "peak"),
    [
        ("gpipe", {}, lambda p, m, d: m),
        ("1f1b", {}, lambda p, m, d: min(m, p - d)),
        ("1f1b", {"warmup": "pb"}, lambda p, m, d: min(m, 2 * (p - d) - 1)),
    ],
)
def test_peak_of_microbatches_in_flight(schedule, options, peak):
    for p, m in GRID:
        program, prices = pipeline(p, m, schedule, options), UnitPrices(saved=7)
        curves = memory_curves(simulate(program, prices), program=program, prices=prices)
        assert [curve.peak_in_flight for curve in curves] == [peak(p, m, d) for d in range(p)]
        assert [curve.peak_bytes for curve in curves] == [7 * peak(p, m, d) for d in range(p)]
        assert all(curve.in_flight[-1] == curve.held_bytes[-1] == 0 for curve in curves)


def test_more_warmup_removes_the_latency_of_every_microbatch():
    """Messages as long as a forward, fused backward: 85 with warm-up p - d, 63 with 2(p - d) - 1."""
    spans = [
        simulate(pipeline(4, 16, "1f1b", {"warmup": warmup}, early_release=False), UnitPrices(latency=1.0)).makespan
        for warmup in ("pa", "pb")
    ]
    assert spans == [85.0, 63.0]


@pytest.mark.parametrize(
    ("warmup", "idle"),
    [("pa", {8: 27.5, 16: 31.0, 32: 38.0, 64: 52.0}), ("pb", {8: 24.5, 16: 24.5, 32: 24.5, 64: 24.5})],
)
def test_idle_with_a_quarter_of_latency(warmup, idle):
    """The least warm-up loses time in every micro-batch, the other does not."""
    for m, expected in idle.items():
        program = pipeline(8, m, "1f1b", {"warmup": warmup}, early_release=False)
        assert simulate(program, UnitPrices(latency=0.25)).idle_with_flush(0) == expected


@dataclass(frozen=True)
class Chain(UnitPrices):
    """Prices of a chain: seconds per stage (F, B) and per link (both directions), and of every reduction."""

    stage_s: tuple[tuple[float, float], ...] = ()
    link_s: tuple[tuple[float, float], ...] = ()
    reduction_s: tuple[float, ...] = ()

    def compute_s(self, compute, rank, samples):
        forward, backward = self.stage_s[compute.stage]
        return {"F": forward, "I": backward, "W": 0.0}[compute.kind]

    def transfer_s(self, message, sender, receiver):
        return self.link_s[min(message.source, message.target)][message.direction == "B"]

    def reduce_s(self, bucket, program):
        return self.reduction_s[bucket]


def replicated(p: int, m: int, options: Options) -> VerifiedProgram:
    """Return the program of p stages whose gradients are reduced over two replicas each."""
    layout = Layout(tuple((2 * s, 2 * s + 1) for s in range(p)))
    edges = [edge for s in range(p - 1) for edge in (Edge("F", s, s + 1, 1.0), Edge("B", s + 1, s, 1.0))]
    traffic = Traffic(tuple(edges), tuple(Bucket((s,), 1) for s in range(p)))
    order = order_of("1f1b", layout=layout, microbatches=m, options=options)
    return verify(lower(order, layout=layout, sizes=(2,) * m, traffic=traffic))


@pytest.mark.parametrize(
    ("forward", "backward", "reduction", "m", "star", "expected"),
    [
        ((4, 1, 4), (8, 1, 8), (0, 0), 4, "3,1", (64, 62, 62)),
        ((4, 1, 4), (8, 1, 8), (30, 6), 4, "3,1", (94, 92, 92)),
        ((3, 0.5, 5, 0.5, 2), (6, 0.5, 10, 0.5, 4), (0, 0, 0), 8, "3,2,1", (132, 130, 132)),
        ((3, 0.5, 5, 0.5, 2), (6, 0.5, 10, 0.5, 4), (9, 3, 60), 8, "3,2,1", (172, 160, 172)),
        ((1, 2, 1, 2, 1, 2, 1), (2, 2, 2, 2, 2, 2, 2), (0,) * 4, 8, "7,5,3,1", (65, 48, 48)),
        ((6, 1, 2, 1, 2, 1, 2), (12, 1, 4, 1, 4, 1, 4), (5, 0, 0, 0), 6, "3,2,1,1", (119, 115, 125)),
    ],
)
def test_makespan_of_uneven_stages_and_links(forward, backward, reduction, m, star, expected):
    """Stages and links alternate; PA, PB and 1F1B* against an independent event simulation."""
    both = list(zip(forward, backward, strict=True))
    prices = Chain(stage_s=tuple(both[::2]), link_s=tuple(both[1::2]), reduction_s=reduction)
    programs = [replicated(len(both[::2]), m, {"warmup": warmup}) for warmup in ("pa", "pb", star)]
    assert tuple(simulate(program, prices).makespan for program in programs) == expected
