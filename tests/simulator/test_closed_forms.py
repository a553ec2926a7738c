"""Laws of the simulator: published closed forms, for every number of stages and micro-batches.

Notation: p stages, m micro-batches, tF tI tW seconds of the computes, tB = tI + tW.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from lightning_pipe.core.program import Bucket, Edge, Layout, Options, Traffic, VerifiedProgram
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.verify import verify
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


def offloading(
    p: int, m: int, schedule: str = "gpipe", *, split: bool = True, beside: tuple[int, ...] = ()
) -> VerifiedProgram:
    """Return the program of p stages on p ranks, of which the first offloads."""
    program = pipeline(p, m, schedule, {})
    order = order_of(schedule, layout=program.layout, microbatches=m)
    traffic = replace(program.traffic, offloads=(0,))
    return verify(lower(order, layout=program.layout, sizes=program.sizes, traffic=traffic, split=split, beside=beside))


def test_swaps_that_fit_between_forward_and_backward_cost_no_time():
    """GPipe on one rank, three micro-batches or more: copies no longer than F have ended when I needs them.

    Between F and I of the first lie (m - 1) tF >= 2 s; later ones find the lanes free.
    """
    for m in (3, 4, 9):
        for share in (0.0, 0.5, 1.0):
            prices = UnitPrices(1.0, 2.0, 1.5, swap=share)
            assert simulate(offloading(1, m), prices).makespan == simulate(pipeline(1, m, "gpipe", {}), prices).makespan


def test_swaps_lower_the_peak_from_all_micro_batches_to_four():
    """GPipe on one rank, copies as long as F, so that one micro-batch is on its way in each direction at any time.

    Without offloading m micro-batches are held. With it, at the turn from F to I, those that are not away are the one
    that is used and three that are on their way back for the next, or have not left yet. The rank waits for the end of
    a copy when one more F has run beside it, and for none with these times.
    """
    for m in (6, 9, 20):
        prices = UnitPrices(saved=10, offloaded=10, swap=1.0)
        kept, swapped = pipeline(1, m, "gpipe", {}), offloading(1, m, beside=(1,))
        peaks = [
            memory_curves(simulate(program, prices), program=program, prices=prices)[0].peak_bytes
            for program in (kept, swapped)
        ]
        assert peaks == [10 * m, 40]


@pytest.mark.parametrize("split", [True, False])
def test_a_swap_that_does_not_fit_delays_the_backward_by_exactly_the_difference(split):
    """One micro-batch, two stages: between F and I of the first lie tF + tI of the second (tF + tI + tW in one piece).

    Both ways take 2 s, so the step is longer by max(0, 2 s - that).
    """
    for f, i, w in some_times():
        between = f + i if split else f + i + w
        kept = simulate(offloading(2, 1, split=split), UnitPrices(f, i, w)).makespan
        for s in (0.0, between / 4, between / 2, between, 2 * between):
            makespan = simulate(offloading(2, 1, split=split), UnitPrices(f, i, w, swap=s)).makespan
            assert makespan == pytest.approx(kept + max(0.0, 2 * s - between)), (f, i, w, s)


def test_two_swaps_share_the_lane():
    """Two micro-batches on one rank, copies of three units, and one unit for each of F, I and W.

    compute | F0 F1  .  .  .  .  . I0 W0  . I1 W1
    out     |  . E0 == == E1 == ==
    in      |  .  .  .  . G0 == == G1 == ==
    """
    timeline = simulate(offloading(1, 2), UnitPrices(swap=3.0))
    times = {str(event.instruction): (event.start, event.end) for event in timeline.events}
    assert [times[f"0EVICT{m}"] for m in range(2)] == [(1.0, 4.0), (4.0, 7.0)]
    assert [times[f"0FETCH{m}"] for m in range(2)] == [(4.0, 7.0), (7.0, 10.0)]
    assert [times[f"0I{m}"][0] for m in range(2)] == [7.0, 10.0]
    assert timeline.makespan == 12.0


def test_a_rank_that_copies_slowly_waits_instead_of_holding_more():
    """One compute beside a copy, GPipe on one rank, copies of s > 1 units: F of micro-batch k + 2 waits for copy k.

    compute | F0 F1  .  . F2  .  . F3
    out     |  . E0 == == E1 == == E2
    """
    m, prices = 6, UnitPrices(saved=10, offloaded=10)
    program = offloading(1, m, beside=(1,))
    for s in (0.5, 1.0, 3.0, 7.0):
        slow = replace(prices, swap=s)
        timeline = simulate(program, slow)
        starts = [event.start for event in timeline.computes(0) if event.instruction.kind == "F"]
        assert starts == [0.0, *(1.0 + k * max(1.0, s) for k in range(m - 1))]
        (curve,) = memory_curves(timeline, program=program, prices=slow)
        assert curve.peak_bytes == 40, "whatever the copies take"


def test_copies_of_different_ranks_do_not_wait_for_each_other():
    """1F1B with one micro-batch: the second rank's copies are late by 2 s - 0, the first's are then hidden."""
    program = pipeline(2, 1, "1f1b", {})
    order = order_of("1f1b", layout=program.layout, microbatches=1)
    traffic = replace(program.traffic, offloads=(0, 1))
    both = verify(lower(order, layout=program.layout, sizes=(1,), traffic=traffic))
    kept = simulate(both, UnitPrices()).makespan
    for s in (0.5, 2.0, 4.0):
        assert simulate(both, UnitPrices(swap=s)).makespan == kept + 2 * s
