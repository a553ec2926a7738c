"""Laws of Chimera: the order of its authors' programs, and what its closed forms do not state."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.closed_forms import EQUAL, FUSED, SPLIT, Row, run
from lightning_pipe.core.program import Compute
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.layout_shapes import both_ways, looping

DOUBLING = {"concatenation": "doubling"}


def program_of_the_authors(p: int, d: int, units: int, *, doubling: bool) -> list[Compute]:
    """Return what a device does after `main_with_runtime_{direct,forward_doubling}.py` of Shigangli/Chimera.

    a is the pipe that enters the row on the side of the device, b the other; a capital is a backward.
    """
    half = p // 2
    first = half - d if d < half else d - half + 1
    second = half - first
    together = 2 if doubling else 1
    text = "a" * together * first
    for unit in range(units):
        text += ("A" + "a" * together) * first if unit else ""
        text += ("b" * together + "a" * together) * second
        text += ("b" * together + "B") * first
        text += "AB" * (second + (half if doubling else 0))
    text += "A" * first
    done: Counter[str] = Counter()
    line = []
    for letter in text:
        goes_down = (letter in "aA") == (d < half)
        number, kind = 2 * done[letter] + (not goes_down), "F" if letter in "ab" else "B"
        line.append(Compute(d if goes_down else p - 1 - d, kind, number))
        done[letter] += 1
    return line


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("p", [2, 4, 6, 8])
@pytest.mark.parametrize("doubling", [False, True])
def test_the_order_is_that_of_its_authors(p, units, doubling):
    row = Row("chimera", p, units * p * (1 + doubling), options=DOUBLING if doubling else {})
    for d, line in enumerate(row.order):
        assert list(line) == program_of_the_authors(p, d, units, doubling=doubling), d


@pytest.mark.parametrize("m", range(1, 17))
def test_doubling_needs_more_than_a_direct_unit(m):
    """Four devices: up to 4 micro-batches it changes nothing, and what is left of units of 8 goes alone."""
    order = Row("chimera", 4, m, options=DOUBLING).order
    assert (order == Row("chimera", 4, m).order) == (m <= 4)
    starts_in_pairs = [line[0].microbatch + 2 == line[1].microbatch and line[1].kind == "F" for line in order if m > 4]
    assert all(starts_in_pairs)


def test_four_devices_with_equal_times_idle_two_units_where_one_pipe_idles_six():
    chimera, one_pipe = run(Row("chimera", 4, 4), EQUAL), run(Row("1f1b", 4, 4), EQUAL)
    assert (chimera.makespan, chimera.idle_with_flush(0)) == (10, 2)
    assert (one_pipe.makespan, one_pipe.idle_with_flush(0)) == (14, 6)


@pytest.mark.parametrize(("m", "idle"), [(8, 16.75), (16, 25.75), (32, 43.75)])
def test_messages_of_a_quarter_cost_this_on_eight_devices(m, idle):
    assert run(Row("chimera", 8, m), FUSED, latency=0.25).idle_with_flush(0) == idle


@pytest.mark.parametrize("m", [16, 32])
def test_messages_of_a_quarter_delay_split_backwards_of_double_units_once_only(m):
    assert run(Row("chimera", 8, m, options=DOUBLING), SPLIT, latency=0.25).idle_with_flush(0) == 7.5


@pytest.mark.parametrize("layout", [looping([(0,), (1,)], 1), both_ways([(0,), (1,)], 2)])
def test_another_layout_is_refused(layout):
    with pytest.raises(ConfigError, match=r"schedule 'chimera' needs stages with two replicas .*, 1 on each device"):
        order_of("chimera", layout=layout, microbatches=4)


def test_another_concatenation_is_named():
    with pytest.raises(ConfigError, match="found concatenation 'halving'; expected one of 'direct', 'doubling'"):
        order_of("chimera", layout=both_ways([(0,), (1,)], 1), microbatches=4, options={"concatenation": "halving"})
