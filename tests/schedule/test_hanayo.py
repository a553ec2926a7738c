"""Laws of Hanayo that its closed forms do not state."""

from __future__ import annotations

import pytest

from benchmarks.closed_forms import EQUAL, FUSED, Row, program_of, run
from lightning_pipe.core.program import Send
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.layout_shapes import looping, zigzag


@pytest.mark.parametrize(("chunks", "makespan"), [(2, 22), (4, 38)])
def test_four_devices_with_equal_times_take_this_in_one_and_two_waves(chunks, makespan):
    assert run(Row("hanayo", 4, 4, chunks), EQUAL).makespan == makespan


@pytest.mark.parametrize(
    ("chunks", "m", "idle"), [(2, 8, 24.0), (2, 16, 37.5), (2, 32, 64.5), (4, 8, 24.0), (4, 16, 41.0)]
)
def test_messages_of_a_quarter_cost_this_on_eight_devices(chunks, m, idle):
    """A quarter of the forward of a device, which is all of its chunks; so is the idle time."""
    assert run(Row("hanayo", 8, m, chunks), FUSED, latency=chunks / 4).idle_with_flush(0) / chunks == idle


@pytest.mark.parametrize("chunks", [2, 4])
def test_nothing_is_sent_at_turning_points(chunks):
    """Every micro-batch crosses between devices within each of 2 W legs only, both ways."""
    p, m = 4, 3
    sent = [one for line in program_of(Row("hanayo", p, m, chunks)).ranks for one in line if isinstance(one, Send)]
    assert len(sent) == 2 * m * chunks * (p - 1)


@pytest.mark.parametrize("chunks", [2, 4, 6])
@pytest.mark.parametrize("m", [1, 3])
def test_one_device_runs_one_micro_batch_after_the_other(chunks, m):
    (line,) = Row("hanayo", 1, m, chunks).order
    computes = [(s, "F") for s in range(chunks)] + [(s, "B") for s in reversed(range(chunks))]
    assert [(c.microbatch, (c.stage, c.kind)) for c in line] == [(i, one) for i in range(m) for one in computes]


def test_replicas_run_the_line_of_their_device():
    single = order_of("hanayo", layout=zigzag([(0,), (1,)], 2), microbatches=5)
    assert order_of("hanayo", layout=zigzag([(0, 3), (1, 2)], 2), microbatches=5) == (*single, single[1], single[0])


def test_another_layout_is_refused():
    with pytest.raises(ConfigError, match=r"schedule 'hanayo' needs stages that go along the devices forth and back"):
        order_of("hanayo", layout=looping([(0,), (1,)], 2), microbatches=4)


@pytest.mark.parametrize("chunks", [1, 3])
def test_half_a_wave_is_refused(chunks):
    with pytest.raises(ConfigError, match=rf"schedule 'hanayo': found {chunks} stages per device; .* even number"):
        order_of("hanayo", layout=zigzag([(0,), (1,)], chunks), microbatches=4)
