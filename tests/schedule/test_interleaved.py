"""Laws of interleaved 1F1B that its closed form does not state."""

from __future__ import annotations

import pytest

from benchmarks.closed_forms import FUSED, SPLIT, Row, peaks, program_of, run
from lightning_pipe.errors import ConfigError
from lightning_pipe.schedule import order_of
from lightning_pipe.schedule.construct.layout_shapes import looping, zigzag
from schedule.torch_orders import torch_order, torch_takes

TORCH = [(p, v, m) for p in (1, 2, 3, 4, 8) for v in (1, 2, 3, 4) for m in (*range(1, 13), 15, 16, 24)]


def test_the_order_is_torchs_wherever_torch_has_one():
    compared = [(p, v, m) for p, v, m in TORCH if torch_takes(p, m)]
    for p, v, m in compared:
        assert Row("interleaved", p, m, v).order == torch_order("ScheduleInterleaved1F1B", p, v, m), (p, v, m)
    assert len(compared) > 200


def test_one_chunk_is_1f1b_that_hides_messages():
    for p, m in ((1, 3), (4, 2), (4, 9), (5, 20)):
        assert Row("interleaved", p, m, 1).order == Row("1f1b", p, m, options={"warmup": "pb"}).order


def test_two_chunks_on_four_devices_save_half_of_the_bubble():
    makespans = [run(Row("interleaved", 4, 8, 2), FUSED).makespan / 2, run(Row("1f1b", 4, 8), FUSED).makespan]
    assert makespans == [28.5, 33.0]


@pytest.mark.parametrize(("v", "idle"), [(2, (10.5, 7.0, 18.0)), (4, (5.25, 3.5, 20.75))])
def test_eight_devices_are_idle_for_so_many_forwards_of_a_device(v, idle):
    """Fused, split, and fused with messages of a quarter forward, which cost nothing per micro-batch."""
    for m in (8, 16)[: 4 // v]:
        runs = [run(Row("interleaved", 8, m, v), *model) for model in ((FUSED,), (SPLIT,))]
        runs.append(run(Row("interleaved", 8, m, v), FUSED, latency=0.25 * v))
        assert tuple(timeline.idle_with_flush(0) / v for timeline in runs) == idle, m


def is_refused(p: int, v: int, m: int, group: int) -> bool:
    try:
        Row("interleaved", p, m, v, {"group": group}).order  # noqa: B018 - it may raise
    except ConfigError:
        return True
    return False


def test_groups_deadlock_only_if_they_are_several_and_two_smaller_than_devices():
    """With two chunks a second group of one micro-batch still goes through."""
    for p in (1, 2, 3, 4, 5):
        for v in (1, 2, 3):
            for group in range(1, p + 2):
                for m in range(1, 2 * group + 4):
                    deadlocks = v > 1 and group <= p - 2 and m > group + (v == 2)
                    assert is_refused(p, v, m, group) == deadlocks, (p, v, m, group)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 20])
@pytest.mark.parametrize("m", [1, 2, 5, 8, 11])
def test_every_group_that_is_not_refused_makes_a_program_that_is_proved(m, group):
    if not is_refused(4, 2, m, group):
        program_of(Row("interleaved", 4, m, 2, {"group": group}))


def test_groups_that_deadlock_are_named_with_who_waits():
    message = r"groups of 1 micro-batches on 3 devices, with which .* next are 3F2 on rank 0, .*; expected groups of 2"
    with pytest.raises(ConfigError, match=message):
        Row("interleaved", 3, 3, 2, {"group": 1}).order  # noqa: B018 - it raises


def test_larger_groups_keep_more_and_hide_messages():
    rows = [Row("interleaved", 4, 16, 2, {"group": group}) for group in (4, 8)]
    assert [peaks(row.order, until="W")[0] for row in rows] == [11, 15]
    times = [run(row, FUSED, latency=1.0).makespan for row in rows]
    assert times[0] > times[1]


def test_what_is_no_multiple_takes_no_longer_than_the_next_multiple():
    for m in (5, 6, 7, 9, 10, 11, 13, 14, 15):
        padded = -(-m // 4) * 4
        assert run(Row("interleaved", 4, m, 2)).makespan <= run(Row("interleaved", 4, padded, 2)).makespan, m


def test_replicas_run_the_line_of_their_device():
    single = order_of("interleaved", layout=looping([(0,), (1,)], 2), microbatches=5)
    assert order_of("interleaved", layout=looping([(0, 2), (1,)], 2), microbatches=5) == (*single, single[0])


@pytest.mark.parametrize("group", [0, -4, "p"])
def test_a_group_is_a_number_from_one_on(group):
    with pytest.raises(ConfigError, match=f"found group {group!r}; expected a number of micro-batches from 1 on"):
        Row("interleaved", 4, 8, 2, {"group": group}).order  # noqa: B018 - it raises


def test_another_layout_is_refused():
    with pytest.raises(ConfigError, match="schedule 'interleaved' needs stages that go round the devices"):
        order_of("interleaved", layout=zigzag([(0,), (1,)], 2), microbatches=4)
