"""Laws of BitPipe that its closed form does not state."""

from __future__ import annotations

import pytest

from benchmarks.closed_forms import FUSED, Row, run
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.layout_shapes import both_ways, zigzag


def test_four_devices_and_four_micro_batches_take_14_units_of_a_device():
    """In chunks: 28. Chimera takes 16, interleaved 1F1B 16.5."""
    assert run(Row("bitpipe", 4, 4), FUSED).makespan == 28
    assert run(Row("chimera", 4, 4), FUSED).makespan == 16
    assert run(Row("interleaved", 4, 4, 2), FUSED).makespan == 33


@pytest.mark.parametrize(("m", "idle"), [(8, 14.25), (16, 24.0), (32, 43.5)])
def test_messages_of_a_quarter_cost_this_on_eight_devices(m, idle):
    """A quarter of the forward of a device, which is two chunks; so is the idle time."""
    assert run(Row("bitpipe", 8, m), FUSED, latency=0.5).idle_with_flush(0) / 2 == idle


def test_the_two_ends_of_the_row_mirror_each_other():
    """What device d does on micro-batch 2 j, device p-1-d does at the same place of its line on 2 j + 1."""
    order = Row("bitpipe", 6, 12).order
    for line, mirrored in zip(order, order[::-1], strict=True):
        assert [(c.stage, c.kind, c.microbatch ^ 1) for c in line] == [
            (c.stage, c.kind, c.microbatch) for c in mirrored
        ]


@pytest.mark.parametrize("layout", [zigzag([(0,), (1,)], 2), both_ways([(0,), (1,)], 1), both_ways([(0,), (1,)], 4)])
def test_another_layout_is_refused(layout):
    with pytest.raises(ConfigError, match=r"schedule 'bitpipe' needs stages with two replicas .*, 2 on each device"):
        order_of("bitpipe", layout=layout, microbatches=4)
