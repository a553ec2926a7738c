"""Clocks of hosts are put right by what messages and sums say, as well as that can be."""

from __future__ import annotations

import time

import pytest

from lightning_pipe.core.program import Recv, Send
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.report.clocks import aligned, clock_offsets
from lightning_pipe.runtime.record import HostClock
from report.runs import LAYOUTS, Shaped, as_recorded, run_of, without_sums

PRICES = Shaped(1.0, 1.3, 0.7, latency=0.4, reduction=2.0, step=0.5)
AHEAD = (0.0, 3.75, -120.5, 7.0)  # seconds by host


def wrong(timeline: Timeline, hosts: tuple[int, ...]) -> Timeline:
    """Return a timeline as hosts with wrong clocks record it."""
    return aligned(timeline, [-AHEAD[host] for host in hosts])


@pytest.mark.parametrize("stages", LAYOUTS)
@pytest.mark.parametrize("hosts", [(0, 1, 2, 3), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0)])
def test_offsets_are_exact_if_messages_are_as_quick_in_both_directions(stages, hosts):
    right = as_recorded(run_of(stages, PRICES))
    hosts = hosts[: len(right.ranks)]
    offsets = clock_offsets([wrong(right, hosts)], hosts=hosts)
    assert offsets == pytest.approx([AHEAD[host] for host in hosts])
    mended = aligned(wrong(right, hosts), offsets)
    assert [event.start for event in mended.events] == pytest.approx([event.start for event in right.events])


def test_the_error_is_at_most_half_of_the_round_trip():
    there, back = 0.1, 0.7
    run = without_sums(run_of(((0,), (1,)), Shaped(links={(0, 1): there, (1, 0): back})))
    first, second = clock_offsets([wrong(as_recorded(run), (0, 1))], hosts=(0, 1))
    assert first == 0.0
    assert second - AHEAD[1] == pytest.approx((there - back) / 2)


def test_a_sum_ends_at_once_on_ranks_that_compute_for_different_times():
    run = as_recorded(run_of(((0, 1, 2),), Shaped(ranks={1: 3.0, 2: 1.5})))
    assert clock_offsets([wrong(run, (0, 1, 2))], hosts=(0, 1, 2)) == pytest.approx(AHEAD[:3])


def test_the_quickest_of_all_steps_counts():
    slow, quick = (as_recorded(run_of(((0,), (1,)), Shaped(links=links))) for links in ({(0, 1): 5.0}, {}))
    steps = [wrong(without_sums(step), (0, 1)) for step in (slow, quick, slow)]
    assert clock_offsets(steps, hosts=(0, 1)) == pytest.approx([0.0, AHEAD[1]])


def test_the_pair_of_hosts_with_the_least_round_trip_is_believed_first():
    """Host 2 hears of host 0 directly (slow, and slower in one direction) and through host 1 (quick)."""
    prices = Shaped(latency=0.1, links={(0, 2): 4.0, (2, 0): 1.0})
    run = as_recorded(without_sums(run_of(((0,), (1,), (2,), (0,)), prices)))
    assert clock_offsets([wrong(run, (0, 1, 2))], hosts=(0, 1, 2)) == pytest.approx(AHEAD[:3])


@pytest.mark.parametrize(("ahead", "believed"), [(5.0, 0.0), (-5.0, -4.6)])
def test_where_messages_go_one_way_only_impossible_times_are_mended_and_no_others(ahead, believed):
    run = as_recorded(run_of(((0,), (1,)), PRICES, training=False))
    offsets = clock_offsets([aligned(run, (0.0, -ahead))], hosts=(0, 1))
    assert offsets == pytest.approx((0.0, believed))
    mended = aligned(aligned(run, (0.0, -ahead)), offsets)
    sent = {e.instruction.message: e.start for e in mended.events if isinstance(e.instruction, Send)}
    received = {e.instruction.message: e.end for e in mended.events if isinstance(e.instruction, Recv)}
    assert all(sent[message] <= received[message] + 1e-9 for message in sent)


def test_hosts_that_never_talk_keep_their_clocks():
    run = without_sums(run_of(((0, 1),), PRICES))
    assert clock_offsets([wrong(run, (0, 1))], hosts=(0, 1)) == (0.0, 0.0)


def test_the_clock_of_a_rank_is_right_though_its_process_loses_the_core_while_it_is_set(monkeypatch):
    """Another process runs between two readings of clocks: not between all of them."""
    now, reads = [1000.0], []

    def read(zero: float) -> float:
        reads.append(zero)
        now[0] += 0.01 if len(reads) in (1, 2, 5) else 1e-7
        return now[0] - zero

    monkeypatch.setattr(time, "perf_counter", lambda: read(900.0))
    monkeypatch.setattr(time, "time", lambda: read(0.0))
    clock = HostClock()
    assert clock.seconds(clock.mark()) == pytest.approx(now[0], abs=1e-6)
