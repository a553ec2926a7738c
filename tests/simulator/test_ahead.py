"""Laws of steps that follow each other without a flush."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from lightning_pipe.core.milestones import Confirm
from lightning_pipe.core.program import AnyCompute, VerifiedProgram
from lightning_pipe.schedule.construct.chain import chain
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.registry import SCHEDULES, order_of
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.simulator import UnitPrices, period, simulate, steps_ahead

QUICK = [name for name in SCHEDULES if name != "milp"]


def program_of(schedule: str, p: int, m: int) -> VerifiedProgram:
    layout = SCHEDULES[schedule].layout([(rank,) for rank in range(p)])
    order = order_of(schedule, layout=layout, microbatches=m)
    return verify(lower(order, layout=layout, sizes=(2,) * m, traffic=chain(len(layout.stages)), confirms=True))


def ends(program: VerifiedProgram, prices: UnitPrices, steps: int) -> list[float]:
    return [max(e.end for e in timeline.events) for timeline in steps_ahead(program, prices, steps)]


def test_two_steps_of_zb_h2_take_24_and_24_and_3_units():
    """The example of Qi et al. 2023: four stages, eight micro-batches."""
    assert ends(program_of("zb_h2", 4, 8), UnitPrices(), 2) == [27, 24 + 24 + 3]


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zero_bubble_schedules_take_as_long_as_one_device_computes(p):
    for m in (2 * p - 1, 2 * p, 3 * p):
        assert period(program_of("zb_h2", p, m), UnitPrices()) == 3 * m
        assert period(program_of("zb_v", p, m), UnitPrices()) == 6 * m


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "2bp", "zb_h1"])
def test_nothing_is_gained_where_the_first_rank_begins_first_and_ends_last(schedule):
    program = program_of(schedule, 4, 8)
    assert period(program, UnitPrices()) == simulate(program, UnitPrices()).makespan


def test_a_rank_waits_for_the_end_of_the_last_step_where_it_confirms_it():
    """Without a confirmation rank 0 would begin its backward at once; with one it waits for the slow last rank."""
    program = program_of("zb_h2", 2, 4)
    begins = (0.0, 100.0)
    timeline = simulate(program, UnitPrices(), begins=begins)
    confirmed = {e.rank: e for e in timeline.events if e.instruction == Confirm()}
    assert confirmed[0].end == confirmed[0].start + (100.0 - confirmed[0].start) == 100.0
    assert confirmed[1].end == confirmed[1].start >= 100.0
    backwards = [e for e in timeline.computes(0) if isinstance(e.instruction, AnyCompute) and e.instruction.kind != "F"]
    assert min(e.start for e in backwards) >= 100.0


@pytest.mark.parametrize("schedule", QUICK)
def test_a_step_takes_no_longer_than_with_the_flush_and_no_less_than_a_device_computes(schedule):
    rng = random.Random(schedule)
    program = program_of(schedule, 4, 6)
    for _ in range(5):
        prices = UnitPrices(*(rng.uniform(0.1, 2) for _ in range(3)), latency=rng.uniform(0, 0.5), step=0.2)
        flushed = simulate(program, prices)
        busy = max(flushed.busy(rank) for rank in range(4))
        assert busy + 0.2 <= period(program, prices) * (1 + 1e-9)
        assert period(program, prices) <= flushed.makespan * (1 + 1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2", "zb_v", "chimera"])
def test_a_rank_steps_when_it_has_all_its_sums_and_begins_then(schedule):
    program = program_of(schedule, 4, 8)
    prices = UnitPrices(latency=0.2, reduction=0.5, step=0.3)
    first, second = steps_ahead(program, prices, 2)
    for rank in range(4):
        own = [event for event in first.events if event.rank == rank]
        *before, step = sorted(own, key=lambda event: event.end)
        assert str(step.instruction) == "STEP"
        assert step.start == pytest.approx(max(e.end for e in before if "SEND" not in str(e.instruction)))
        assert min(event.start for event in second.computes(rank)) >= step.end
    for a, b in pairwise([first, second]):
        assert len(a.events) == len(b.events)
