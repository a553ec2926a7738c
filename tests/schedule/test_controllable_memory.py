"""Laws of V-Half and V-Min that their closed forms do not state."""

import itertools

import pytest

from benchmarks.closed_forms import Row, peaks
from lightning_pipe.schedule.construct.chain_run import chain_makespan
from lightning_pipe.schedule.construct.stage_times import ChainTimes, unit_times


@pytest.mark.parametrize(("schedule", "m"), [("v_half", 13), ("v_min", 14)])
@pytest.mark.parametrize("p", [3, 5, 6])
def test_a_microbatch_more_takes_a_period_of_six_units_more(schedule, m, p):
    spans = [
        chain_makespan(row.order, row.layout, unit_times(row.layout))
        for row in (Row(schedule, p, m + k) for k in range(4))
    ]
    assert [later - before for before, later in itertools.pairwise(spans)] == [6.0] * 3


@pytest.mark.parametrize("p", [6, 7, 8, 16])
def test_less_memory_takes_more_time(p):
    rows = [Row(schedule, p, 2 * p) for schedule in ("zb_v", "v_half", "v_min")]
    spans = [chain_makespan(row.order, row.layout, unit_times(row.layout)) for row in rows]
    kept = [max(peaks(row.order, until="W")) for row in rows]
    assert spans == sorted(spans)
    assert kept == sorted(kept, reverse=True)
    assert kept[2] < kept[1] < kept[0]


@pytest.mark.parametrize(("forward", "input_grad", "weight_grad"), [(1.0, 1.3, 1.0), (1.4, 1.0, 1.0), (0.7, 1.1, 1.9)])
@pytest.mark.parametrize("p", [3, 4])
def test_v_half_waits_for_nothing_in_its_steady_part_on_up_to_four_devices(p, forward, input_grad, weight_grad):
    """If W + 2I >= 2F and W + 2F >= 2I, a micro-batch more takes no more than its computes."""
    computes = ((forward,) * 2 * p, (input_grad,) * 2 * p, (weight_grad,) * 2 * p)
    rows = [Row("v_half", p, m) for m in (4 * p, 4 * p + 6)]
    free, unit = (0.0,) * (2 * p - 1), unit_times(rows[0].layout)
    times = ChainTimes(*computes, free, free, unit.saved_bytes, unit.kept_bytes, unit.room_bytes)
    before, later = (chain_makespan(row.order, row.layout, times) for row in rows)
    assert later - before == pytest.approx(6 * 2 * (forward + input_grad + weight_grad))
