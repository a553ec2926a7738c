"""The seconds of a rank add up to those of the step, and each of them is called what it is."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest

from lightning_pipe.core.program import Compute, Message, Recv, Samples, Send, Step
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.report.account import Account, accounts, step_interval, step_seconds
from lightning_pipe.simulator import UnitPrices
from report.runs import LAYOUTS, as_recorded, run_of

PRICES = UnitPrices(1.0, 1.3, 0.7, latency=0.4, reduction=2.0, step=0.5)


def total(account: Account) -> float:
    gaps = sum(gap.late + gap.transfer + gap.swap + gap.overhead for gap in account.gaps)
    return sum(account.computes.values()) + gaps + account.reduction + account.optimizer + account.drain


@pytest.mark.parametrize(("stages", "schedule"), list(product(LAYOUTS, ["gpipe", "1f1b"])))
def test_the_seconds_of_every_rank_add_up_to_those_of_the_step(stages, schedule):
    for swap in (0.0, 0.5, 5.0):
        timeline = run_of(stages, replace(PRICES, swap=swap), schedule=schedule, offloads=(0,))
        for account in accounts(timeline):
            assert total(account) == pytest.approx(step_seconds(timeline)), account.rank
            assert min(min(gap.late, gap.transfer, gap.swap, gap.overhead) for gap in account.gaps) >= 0.0
            assert sum(gap.overhead for gap in account.gaps) == pytest.approx(0.0)


@pytest.mark.parametrize("stages", LAYOUTS)
def test_a_recorder_sees_the_same_account(stages):
    timeline = run_of(stages, PRICES)
    assert accounts(as_recorded(timeline)) == accounts(timeline)


@pytest.mark.parametrize("stages", LAYOUTS)
def test_a_simulated_rank_starts_as_soon_as_everything_is_there(stages):
    gaps = [gap for account in accounts(run_of(stages, PRICES)) for gap in account.gaps]
    assert sum(gap.overhead for gap in gaps) == pytest.approx(0.0)


def test_copies_that_are_hidden_are_nobodys_loss_and_others_are_called_swap():
    """One micro-batch, two stages: between F and I of the first lie two units, the copies take 2 s."""
    for swap, expected in ((0.0, 0.0), (1.0, 0.0), (3.0, 4.0)):
        run = run_of(((0,), (1,)), UnitPrices(swap=swap), microbatches=1, offloads=(0,))
        gaps = [gap for account in accounts(run) for gap in account.gaps]
        assert [gap.swap for gap in gaps if gap.compute == Compute(0, "I", 0)] == [expected]
        assert sum(gap.swap for gap in gaps) == expected


def test_messages_that_take_no_time_are_nobodys_loss():
    gaps = [gap for account in accounts(run_of(LAYOUTS[0], UnitPrices())) for gap in account.gaps]
    assert sum(gap.transfer for gap in gaps) == 0.0 < sum(gap.late for gap in gaps)


def test_receives_posted_before_the_step_do_not_lengthen_it():
    timeline = run_of(LAYOUTS[0], PRICES)
    assert step_interval(as_recorded(timeline, posted=-100.0)) == step_interval(timeline)


def test_steps_that_ranks_begin_before_others_have_ended_the_last_one_add_up_to_what_they_take():
    """Rank 0 of two stages does nothing after its backward, and begins the next step while the optimizer of 1 steps."""
    one = run_of(((0,), (1,)), UnitPrices(1.0, 1.0, 1.0, step=5.0))
    ended = max(event.end for event in one.events)
    again = tuple(replace(event, start=event.start + ended - 3.0, end=event.end + ended - 3.0) for event in one.events)
    for since, seconds in ((-math.inf, ended), (ended, ended - 3.0), (ended - 4.0, ended)):
        step = Timeline(again, since)
        assert step_seconds(step) == pytest.approx(seconds)
        assert accounts(step) == accounts(Timeline(again)), "each rank did what it did"


def test_a_gap_is_late_then_transfer_then_overhead():
    message = Message("F", 0, 1, 0, Samples(0, 2))
    timeline = Timeline(
        (
            Event(0, Compute(0, "F", 0), 0.0, 3.0),
            Event(0, Send(message, 1), 3.5, 3.5),
            Event(1, Compute(1, "F", 9), 0.0, 1.0),
            Event(1, Recv(message, 0), 0.0, 5.0),
            Event(1, Compute(1, "F", 0), 5.25, 6.0),
            Event(1, Compute(1, "W", 9), 6.5, 8.0),
            Event(1, Step(), 9.0, 9.5),
        )
    )
    account = accounts(timeline)[1]
    found = [(gap.first, gap.late, gap.transfer, gap.overhead, gap.link) for gap in account.gaps]
    assert found == [(True, 0, 0, 0, None), (False, 2.0, 2.0, 0.25, (0, 1)), (False, 0, 0, 0.5, None)]
    assert (account.reduction, account.optimizer, account.drain) == (1.0, 0.5, 0.0)
    assert accounts(timeline)[0].drain == 6.5


def test_of_several_messages_the_one_made_last_counts():
    early, last = (Message("F", 0, 1, 0, Samples(i, i + 1)) for i in range(2))
    timeline = Timeline(
        (
            Event(0, Compute(0, "F", 0), 0.0, 2.0),
            Event(1, Compute(0, "F", 0), 0.0, 4.0),
            Event(2, Recv(last, 1), 0.0, 5.0),
            Event(2, Recv(early, 0), 0.0, 5.0),  # seen after the other, for which the rank waited first
            Event(2, Compute(1, "F", 0), 5.0, 6.0),
        )
    )
    gap = accounts(timeline)[2].gaps[0]
    assert (gap.late, gap.transfer, gap.overhead) == (4.0, 1.0, 0.0)
