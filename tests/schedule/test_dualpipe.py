"""Laws of DualPipe and DualPipeV that their closed forms do not state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.closed_forms import FUSED, SPLIT, Row, peaks, run
from lightning_pipe.core.program import Compute
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.layout_shapes import both_ways, looping, zigzag

KINDS = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "B"}


def torch_lines(p: int, m: int) -> Iterator[tuple[Compute, ...]]:
    """Yield the lines of torch's DualPipeV, its overlapping pairs as F, then B."""
    pytest.importorskip("torch")
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, "ScheduleDualPipeV"):
        pytest.skip("this torch has no ScheduleDualPipeV")
    one = object.__new__(schedules.ScheduleDualPipeV)  # its constructor wants stages with process groups
    one.pp_group_size, one._n_microbatches = p, m
    for rank in range(p):
        actions = one._calculate_single_rank_operations(rank)
        parts = [part for action in actions for part in (action.sub_actions or (action,))]
        yield tuple(Compute(a.stage_index, KINDS[a.computation_type.name], a.microbatch_index) for a in parts)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (1, 5), (2, 4), (2, 7), (3, 6), (4, 8), (4, 11), (8, 16), (8, 21)])
def test_the_order_of_dualpipe_v_is_torchs(p, m):
    assert Row("dualpipe_v", p, m).order == tuple(torch_lines(p, m))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16), (8, 20)])
def test_half_of_dualpipe_is_dualpipe_v(p, m):
    """Folded at its middle, the row is that of DualPipeV; the late stage of a device is the other pipe's."""
    folded = Row("dualpipe_v", p // 2, m // 2).order
    for d, line in enumerate(Row("dualpipe", p, m).order):
        place = min(d, p - 1 - d)
        expected = [(c.kind, c.stage == place, c.microbatch) for c in folded[place]]
        is_down = d < p // 2
        found = [(c.kind, (c.microbatch % 2 == 0) == is_down, c.microbatch // 2) for c in line]
        assert found == expected, d
        assert {(c.stage, c.microbatch % 2) for c in line} == {(d, 0), (p - 1 - d, 1)}


def test_eight_devices_and_sixteen_micro_batches_idle_three_units_and_keep_nine():
    row = Row("dualpipe", 8, 16)
    assert run(row).idle_with_flush(0) == 3
    assert peaks(row.order, until="W") == [9] * 8


@pytest.mark.parametrize("m", [16, 32])
@pytest.mark.parametrize(
    ("schedule", "chunks", "idle"), [("dualpipe", 1, (3.0, 3.0, 7.25)), ("dualpipe_v", 2, (3.5, 3.5, 13.5))]
)
def test_idle_time_on_eight_devices_with_and_without_messages_of_a_quarter(schedule, chunks, idle, m):
    """A quarter of the forward of a device, which is all of its chunks; so is the idle time."""
    row = Row(schedule, 8, m)
    timelines = run(row, FUSED), run(row, SPLIT), run(row, FUSED, latency=chunks / 4)
    assert tuple(timeline.idle_with_flush(0) / chunks for timeline in timelines) == idle


def test_replicas_run_the_line_of_their_device():
    single = order_of("dualpipe_v", layout=zigzag([(0,), (1,)], 2), microbatches=5)
    assert order_of("dualpipe_v", layout=zigzag([(0, 3), (1, 2)], 2), microbatches=5) == (*single, single[1], single[0])


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("dualpipe", looping([(0,), (1,)], 1)),
        ("dualpipe", both_ways([(0,), (1,)], 2)),
        ("dualpipe_v", looping([(0,), (1,)], 2)),
        ("dualpipe_v", zigzag([(0,), (1,)], 4)),
    ],
)
def test_another_layout_is_refused(schedule, layout):
    with pytest.raises(ConfigError, match=rf"schedule '{schedule}' needs stages .* on each device"):
        order_of(schedule, layout=layout, microbatches=4)
