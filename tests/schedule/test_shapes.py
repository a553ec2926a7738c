"""Laws of shapes: a row of devices is found again in the layout that was made from it, and in no other."""

import pytest

from lightning_pipe.core.program import Layout
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule.construct.layout_shapes import both_ways, looping, row_of, zigzag

SINGLE = [(0,), (1,), (2,), (3,)]
GROUPS = [(0, 3), (1,), (4, 2)]


def test_shapes_are_drawn_right():
    assert looping(SINGLE[:2], 2).stages == ((0,), (1,), (0,), (1,))
    assert zigzag(SINGLE[:3], 3).stages == ((0,), (1,), (2,), (2,), (1,), (0,), (0,), (1,), (2,))
    assert both_ways(SINGLE, 1) == Layout(((0, 3), (1, 2), (2, 1), (3, 0)), frozenset(range(4)))
    assert both_ways(SINGLE[:2], 2) == Layout(((0, 1), (1, 0), (1, 0), (0, 1)), frozenset(range(4)))


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [looping, zigzag])
@pytest.mark.parametrize("devices", [SINGLE, GROUPS, [(0, 1)], [(2,), (0,), (1,)]])
def test_a_row_is_found_again(devices, shape, chunks):
    row = row_of(shape(devices, chunks), shape, schedule="any")
    assert (list(row.devices), row.stages_per_device) == (devices, chunks)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("devices", [SINGLE, SINGLE[:2], SINGLE[::-1]])
def test_a_row_of_both_ways_is_found_again(devices, chunks):
    row = row_of(both_ways(devices, chunks), both_ways, schedule="any")
    assert (list(row.devices), row.stages_per_device) == (devices, chunks)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (zigzag(SINGLE, 2), looping),
        (looping(SINGLE, 2), zigzag),
        (looping(SINGLE, 2), both_ways),
        (Layout(both_ways(SINGLE, 1).stages), both_ways),
        (Layout(((0,), (1,), (0,))), looping),
        (Layout(((0, 1), (0, 2), (3,))), looping),
        (Layout(((0, 1), (1, 2))), both_ways),
    ],
)
def test_another_layout_is_refused(layout, shape):
    with pytest.raises(ConfigError, match=r"schedule 'any' needs .* found the ranks"):
        row_of(layout, shape, schedule="any")


@pytest.mark.parametrize("devices", [SINGLE[:3], [(0, 1), (2, 3)]])
def test_two_pipes_need_an_even_row_of_single_ranks(devices):
    with pytest.raises(ConfigError, match="even number of devices"):
        both_ways(devices, 1)
