"""Laws of ZB-V that its closed form does not state."""

from __future__ import annotations

import pytest

from benchmarks.closed_forms import Row, run
from lightning_pipe.core.program import Compute, Order
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.layout_shapes import looping, zigzag


def torch_order(p: int, m: int) -> Order:
    """Return the order of torch's ZB-V, without its idle places."""
    pytest.importorskip("torch")
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, "ScheduleZBVZeroBubble"):
        pytest.skip("this torch has no ScheduleZBVZeroBubble")
    one = object.__new__(schedules.ScheduleZBVZeroBubble)  # its constructor wants stages with process groups
    one.pp_group_size, one.num_stages, one._num_stages, one._n_microbatches = p, 2 * p, 2 * p, m
    names = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    lines = [[a for a in one._calculate_single_rank_operations(rank) if a is not None] for rank in range(p)]
    return tuple(
        tuple(Compute(a.stage_index, names[a.computation_type.name], a.microbatch_index) for a in line)
        for line in lines
    )


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (2, 6), (3, 4), (4, 8), (4, 5), (8, 20)])
def test_the_order_is_torchs(p, m):
    assert Row("zb_v", p, m).order == torch_order(p, m)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (5, 9), (8, 16)])
def test_no_device_waits_within_its_span(p, m):
    timeline = run(Row("zb_v", p, m))
    assert [timeline.span(d) for d in range(p)] == [6 * m] * p


def test_four_devices_and_eight_microbatches_take_51_units():
    timeline = run(Row("zb_v", 4, 8))
    assert (timeline.makespan, timeline.span(0), timeline.busy(0)) == (51, 48, 48)


@pytest.mark.parametrize(("m", "idle"), [(8, 14.0), (16, 11.75), (32, 11.75), (64, 11.75)])
def test_messages_of_a_quarter_cost_this_on_eight_devices(m, idle):
    """A quarter of the forward of a device, which is two chunks; so is the idle time."""
    assert run(Row("zb_v", 8, m), latency=0.5).idle_with_flush(0) / 2 == idle


def test_replicas_run_the_line_of_their_device():
    single = order_of("zb_v", layout=zigzag([(0,), (1,)], 2), microbatches=5)
    assert order_of("zb_v", layout=zigzag([(0, 3), (1, 2)], 2), microbatches=5) == (*single, single[1], single[0])


@pytest.mark.parametrize("layout", [looping([(0,), (1,)], 2), zigzag([(0,), (1,)], 1), zigzag([(0,), (1,)], 4)])
def test_another_layout_is_refused(layout):
    with pytest.raises(ConfigError, match=r"schedule 'zb_v' needs stages .* forth and back .*, 2 on each"):
        order_of("zb_v", layout=layout, microbatches=4)
