"""The runtime's own seconds are those of a rehearsal that neither work nor posted messages account for."""

from __future__ import annotations

import pytest
import torch

from lightning_pipe.core.program import Compute, Message, Recv, Samples, Send
from lightning_pipe.core.timeline import Event, Timeline
from lightning_pipe.strategy.plans.runtime_overhead import _Layer, _rehearsed

WORK, CALL, BEFORE, POST, FLIGHT = 2.0, 0.25, 0.125, 0.5, 0.0625


def sent(microbatch: int) -> Message:
    return Message("F", 0, 1, microbatch, Samples(0, 1))


def rehearsal(microbatches: int) -> list[Timeline]:
    """Return what two ranks would record of forwards only, the second always waiting for the first."""
    first, second = [], []
    now = 0.0
    for m in range(microbatches):
        end = now + WORK + CALL
        first += [Event(0, Compute(0, "F", m), now, end), Event(0, Send(sent(m), 1), end, end + POST)]
        arrived = end + FLIGHT
        begun = arrived + BEFORE
        second += [
            Event(1, Recv(sent(m), 0), 0.0, arrived),
            Event(1, Compute(1, "F", m), begun, begun + WORK + CALL),
        ]
        now = end + POST + BEFORE
    return [Timeline(tuple(first)), Timeline(tuple(second))]


def test_work_and_posts_are_no_part_of_a_call_and_what_is_waited_for_is_that_of_messages():
    told = [[(timeline, WORK)] * 3 for timeline in rehearsal(10)]
    found = _rehearsed(told)
    assert found.call_s == pytest.approx(CALL + BEFORE)
    assert found.message_s == pytest.approx(FLIGHT)


def test_a_core_that_is_slow_after_it_waited_makes_calls_longer():
    slow = 0.5
    found = _rehearsed([[(timeline, WORK - slow)] * 3 for timeline in rehearsal(10)])
    assert found.call_s == pytest.approx(CALL + BEFORE + slow), "its work, alone, took less"


def test_work_takes_time_and_leaves_random_numbers_and_gradients_alone():
    before = torch.get_rng_state()
    layer = _Layer(torch.device("cpu"))
    assert 0 < layer.alone_s() < 60
    layer(0, "F", 1)
    assert torch.equal(before, torch.get_rng_state())
