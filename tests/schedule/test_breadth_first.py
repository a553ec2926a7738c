"""Laws of breadth-first that its closed form does not state."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.closed_forms import FORMS, FUSED, SPLIT, Row, deviations, run
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.layout_shapes import looping, zigzag
from schedule.torch_orders import torch_order


@pytest.mark.parametrize(
    ("p", "v", "m"), [(1, 2, 3), (2, 1, 4), (2, 2, 1), (3, 3, 5), (4, 2, 8), (4, 4, 3), (8, 2, 20)]
)
def test_the_order_with_descending_backwards_is_torchs(p, v, m):
    order = Row("breadth_first", p, m, v, {"backward": "descending"}).order
    assert order == torch_order("ScheduleLoopedBFS", p, v, m)


@pytest.mark.parametrize("backward", ["ascending", "descending"])
def test_a_device_works_on_every_chunk_in_one_block_of_each_pass(backward):
    """So sharded parameters are gathered twice and gradients reduced once per step."""
    for line in Row("breadth_first", 4, 8, 4, {"backward": backward}).order:
        blocks = [key for key, _ in itertools.groupby(line, key=lambda compute: (compute.stage, compute.kind))]
        assert len(blocks) == len(set(blocks)) == 2 * 4


def test_one_chunk_is_gpipe():
    assert Row("breadth_first", 4, 6, 1).order == Row("gpipe", 4, 6).order


def test_two_chunks_on_four_devices_take_as_long_as_interleaved():
    assert [run(Row(name, 4, 8, 2), FUSED).makespan for name in ("breadth_first", "interleaved")] == [57, 57]


@pytest.mark.parametrize(("m", "makespan"), [(2, 27), (3, 30)])
def test_fewer_microbatches_than_devices_take_this(m, makespan):
    assert run(Row("breadth_first", 4, m, 2), FUSED).makespan == makespan


def test_the_closed_form_holds_for_fewer_microbatches_than_devices():
    forms = [form for form in FORMS if form.schedule == "breadth_first"]
    found = (deviations(form, p, m) for form in forms for p, m in ((2, 1), (3, 2), (5, 2), (5, 4)))
    assert list(itertools.chain(*found)) == []


@pytest.mark.parametrize(("m", "late"), [(8, 18.0), (16, 14.0)])
def test_eight_devices_are_idle_for_so_many_forwards_of_a_device(m, late):
    """Fused, split, and fused with messages of a quarter forward."""
    row = Row("breadth_first", 8, m, 2)
    runs = [run(row, FUSED), run(row, SPLIT), run(row, FUSED, latency=0.5)]
    assert [timeline.idle_with_flush(0) / 2 for timeline in runs] == [10.5, 7.0, late]


def test_replicas_run_the_line_of_their_device():
    single = order_of("breadth_first", layout=looping([(0,), (1,)], 2), microbatches=5)
    assert order_of("breadth_first", layout=looping([(0, 2), (1,)], 2), microbatches=5) == (*single, single[0])


def test_another_layout_or_direction_is_refused():
    with pytest.raises(ConfigError, match="schedule 'breadth_first' needs stages that go round the devices"):
        order_of("breadth_first", layout=zigzag([(0,), (1,)], 2), microbatches=4)
    with pytest.raises(ConfigError, match='found backward \'up\'; expected "ascending" or "descending"'):
        Row("breadth_first", 2, 4, 2, {"backward": "up"}).order  # noqa: B018 - it raises
