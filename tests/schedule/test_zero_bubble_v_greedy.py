"""Laws of ZB-V for unequal times: never slower than what it starts from, within the peak, faster where W can move."""

from __future__ import annotations

import random

import pytest

from benchmarks.closed_forms import Row, peaks
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.construct.chain_run import chain_makespan
from lightning_pipe.schedule.construct.stage_times import ChainTimes


def v_times(p: int, forward: float, input_grad: float, weight_grad: float, *, message: float = 0.0) -> ChainTimes:
    """Return times of equal stages in V shape; both stages in the middle are on one device."""
    links = tuple(0.0 if s == p - 1 else message for s in range(2 * p - 1))
    ones = (1.0,) * 2 * p
    computes = ((forward,) * 2 * p, (input_grad,) * 2 * p, (weight_grad,) * 2 * p)
    return ChainTimes(*computes, links, links, ones, ones, (float("inf"),) * p)


def random_times(p: int, draw: random.Random) -> ChainTimes:
    return v_times(p, *(draw.uniform(0.3, 2.0) for _ in range(3)), message=draw.choice((0.0, 0.1, 0.5)))


def makespan(schedule: str, p: int, m: int, times: ChainTimes, **options: int) -> float:
    row = Row(schedule, p, m, options=options, times=times)
    return chain_makespan(row.order, row.layout, times)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 5), (3, 3), (4, 6), (4, 11)])
def test_it_is_never_slower_than_zb_v_and_keeps_no_more(p, m):
    draw = random.Random(p * m)
    for _ in range(6):
        times = random_times(p, draw)
        assert makespan("zb_v_greedy", p, m, times) <= makespan("zb_v", p, m, times), times
        assert max(peaks(Row("zb_v_greedy", p, m, times=times).order, until="W")) <= 2 * p, times


def test_with_equal_times_it_is_zb_v():
    for p, m in ((2, 3), (4, 7), (4, 12)):
        assert Row("zb_v_greedy", p, m).order == Row("zb_v", p, m).order


@pytest.mark.parametrize("times", [(1.0, 1.5, 0.7), (1.0, 0.7, 1.6), (1.0, 1.2, 0.5)])
def test_unequal_times_gain(times):
    given = v_times(4, *times, message=0.1)
    assert makespan("zb_v_greedy", 4, 8, given) < makespan("zb_v", 4, 8, given)


@pytest.mark.parametrize("peak", [4, 6, 7])
def test_a_lower_peak_is_kept(peak):
    times = v_times(4, 1.0, 1.4, 0.8)
    row = Row("zb_v_greedy", 4, 9, options={"peak": peak}, times=times)
    assert max(peaks(row.order, until="W")) <= peak
    assert makespan("zb_v_greedy", 4, 9, times, peak=peak) >= makespan("zb_v_greedy", 4, 9, times)


def test_a_higher_peak_is_no_slower():
    times = v_times(4, 1.0, 1.4, 0.8, message=0.3)
    assert makespan("zb_v_greedy", 4, 9, times, peak=12) <= makespan("zb_v_greedy", 4, 9, times)


@pytest.mark.parametrize(("peak", "message"), [(3, "found peak 3; 4 devices need at least 4"), ("many", "peak 'many'")])
def test_a_peak_that_cannot_be_kept_is_named(peak, message):
    with pytest.raises(ConfigError, match=message):
        Row("zb_v_greedy", 4, 8, options={"peak": peak}).order  # noqa: B018 - it raises
