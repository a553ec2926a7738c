"""Laws of zero bubble H1 and H2 that their closed forms do not state."""

from __future__ import annotations

import random

import pytest

from benchmarks.closed_forms import Row, peaks, program_of, run
from lightning_pipe.core.program import Compute
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.layout_shapes import looping
from lightning_pipe.simulator import UnitPrices, simulate
from schedule.torch_orders import torch_order, torch_takes

TORCH = [(p, v, m) for p in (1, 2, 3, 4, 8) for v in (1, 2, 3, 4) for m in (*range(1, 13), 15, 16, 24)]


def test_the_order_of_h1_is_torchs_wherever_torch_has_one():
    compared = [(p, v, m) for p, v, m in TORCH if torch_takes(p, m)]
    for p, v, m in compared:
        assert Row("zb_h1", p, m, v).order == torch_order("ScheduleInterleavedZeroBubble", p, v, m), (p, v, m)
    assert len(compared) > 200


@pytest.mark.parametrize(("p", "m"), [(1, 2), (4, 2), (4, 9), (5, 20)])
def test_with_one_chunk_w_runs_d_computes_behind_1f1b(p, m):
    """The rule of the paper, written down device by device."""
    for d, line in enumerate(Row("zb_h1", p, m).order):
        expected = [Compute(d, "F", k) for k in range(min(m, p - d))]
        for k in range(m):
            expected.append(Compute(d, "I", k))
            expected += [Compute(d, "W", k - d)] if k >= d else []
            expected += [Compute(d, "F", k + p - d)] if k + p - d < m else []
        expected += [Compute(d, "W", k) for k in range(max(0, m - d), m)]
        assert line == tuple(expected), d


IDLE = {  # with flush, in any times
    "zb_h1": lambda p, f, i, w: (p - 1) * max(f, i, f + i - w),
    "zb_h2": lambda p, f, i, w: (p - 1) * max(f, i - f, f + i - 2 * w),
}


@pytest.mark.parametrize("name", IDLE)
def test_idle_time_follows_from_the_times_of_f_i_and_w(name):
    draw = random.Random(0)
    for p, m in ((2, 3), (3, 5), (4, 7), (4, 12), (6, 11), (8, 16)):
        program = program_of(Row(name, p, m))
        for _ in range(8):
            f, i, w = (draw.choice([1.0, 2.0, draw.uniform(0.3, 3.0)]) for _ in range(3))
            idle = simulate(program, UnitPrices(f, i, w)).makespan - m * (f + i + w)
            assert idle == pytest.approx(IDLE[name](p, f, i, w), abs=1e-9 * m * (f + i + w)), (p, m, f, i, w)


def test_h1_takes_27_units_on_four_devices_with_eight_microbatches():
    assert run(Row("zb_h1", 4, 8)).makespan == 27


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 3), (4, 8), (5, 9), (8, 15), (8, 24)])
def test_no_device_of_h2_waits_within_its_span(p, m):
    """With the flush it takes as long as H1."""
    timeline = run(Row("zb_h2", p, m))
    assert [timeline.span(d) for d in range(p)] == [3 * m] * p
    assert timeline.makespan == run(Row("zb_h1", p, m)).makespan == 3 * m + p - 1


@pytest.mark.parametrize(
    ("name", "m", "idle"),
    [
        *(("zb_h1", m, idle) for m, idle in ((8, (7.0, 13.5)), (16, (7.0, 14.0)), (32, (7.0, 14.0)))),
        *(("zb_h2", m, idle) for m, idle in ((8, (10.0, 12.75)), (16, (7.0, 8.75)), (32, (7.0, 8.75)))),
    ],
)
def test_eight_devices_are_idle_for_so_many_forwards(name, m, idle):
    """Without messages, and with messages of a quarter forward."""
    runs = [run(Row(name, 8, m), latency=latency) for latency in (0.0, 0.25)]
    assert tuple(timeline.idle_with_flush(0) for timeline in runs) == idle


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_chunks_divide_the_idle_time_and_are_proved(name):
    for p, m in ((2, 4), (4, 8), (4, 10)):
        assert run(Row(name, p, m, 2)).makespan == 3 * m * 2 + p - 1
    for m in (1, 3, 7, 11):
        program_of(Row(name, 4, m, 3))


def test_one_chunk_does_not_care_for_groups():
    for name in ("zb_h1", "zb_h2"):
        orders = {Row(name, 4, 7, 1, {"group": group}).order for group in (1, 2, 3, 4, 5, 9)}
        assert len(orders) == 1


def test_h1_runs_groups_of_half_the_devices_and_names_smaller_ones():
    """Its first device is p - 1 forwards ahead of the last, that of `interleaved` twice as many."""
    for p in (2, 3, 4, 5, 6):
        for group in range(p // 2, p):
            program_of(Row("zb_h1", p, 3 * group, 2, {"group": group}))
    with pytest.raises(ConfigError, match=r"'zb_h1': found groups of 2 micro-batches on 8 devices, with which .* wait"):
        Row("zb_h1", 8, 16, 2, {"group": 2}).order  # noqa: B018 - it raises


def test_smaller_groups_keep_less():
    kept = [max(peaks(Row("zb_h1", 8, 16, 2, {"group": group}).order, until="W")) for group in (4, 8)]
    assert kept == [12, 16]


def test_replicas_run_the_line_of_their_device():
    single = order_of("zb_h1", layout=looping([(0,), (1,)], 2), microbatches=5)
    assert order_of("zb_h1", layout=looping([(0, 2), (1,)], 2), microbatches=5) == (*single, single[0])
