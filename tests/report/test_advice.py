"""Advice fits the situation: at most three sentences, none of which contradicts another or the user's own options."""

from __future__ import annotations

import itertools
from dataclasses import replace

from lightning_pipe.report.advice import MOST_SENTENCES, Alternative, PlanSituation, advice
from report.runs import Shaped, run_of

GIB = 2**30
PLAN = Alternative("this plan", "plan", 4, 1.0, (3 * GIB, 2 * GIB), True, 0.2, 10 * 2**20, 2)
ONE = Alternative("one device", "one device", 1, 1.6, (5 * GIB,), True, 0.0, 0, 1)
DDP = Alternative("data parallel", "data parallel", 1, 1.3, (6 * GIB, 6 * GIB), True, 0.0, GIB, 1)
UNEVEN = run_of(((0,), (1,)), Shaped(factors={(1, kind): 3.0 for kind in "FIW"}))
CHOICES = [frozenset(), frozenset({"layout"}), frozenset({"plan"}), frozenset({"layout", "schedule", "microbatches"})]


def told(*others: Alternative, chosen: frozenset[str] = frozenset(), plan: Alternative = PLAN, **options) -> str:
    return " ".join(advice(PlanSituation(chosen, options.pop("whole", ""), [plan, *others], UNEVEN, **options)))


def situations():
    """Yield every combination of what the user has set, of plans, of idle stages and ranks, and of measurements."""
    plans = [PLAN, replace(PLAN, stages=1), replace(PLAN, fits=False)]
    ones = [replace(ONE, step_s=s, fits=fits) for s in (0.7, 1.0, 1.8) for fits in (True, False)]
    replicas = [replace(DDP, step_s=s, fits=fits) for s in (0.7, 1.0, 1.8) for fits in (True, False)]
    rest = [((), ()), ((1,), ()), ((), (1,)), ((1,), (1,))]
    for chosen, plan, one, ddp, (stages, ranks), whole, is_disturbed in itertools.product(
        CHOICES, plans, ones, replicas, rest, ("", "it keeps state"), (False, True)
    ):
        yield PlanSituation(chosen, whole, [plan, one, ddp], UNEVEN, stages, ranks, 1, is_disturbed)


def test_there_are_at_most_three_sentences_and_no_option_is_named_that_nobody_set():
    for situation in situations():
        found = advice(situation)
        assert len(found) <= MOST_SENTENCES
        text = " ".join(found)
        for option in ("layout", "schedule", "plan"):
            assert option in situation.chosen or f"Without {option}" not in text, (situation, text)
            assert option in situation.chosen or f"for {option}" not in text, (situation, text)
        if not situation.chosen:
            assert "bottleneck" not in text and "next to nothing" not in text, "the planner's own choice"


def test_no_two_ways_are_advised_at_once():
    for situation in situations():
        text = " ".join(advice(situation))
        assert not ("devices=1" in text and ("it is chosen" in text or "set microbatches=1" in text)), text


def test_measurements_that_other_work_disturbed_advise_nothing():
    for situation in situations():
        if situation.is_disturbed:
            assert "devices=1" not in " ".join(advice(situation))
    assert "so these predictions are rough" in told(ONE, DDP, is_disturbed=True)


def test_what_limits_a_layout_of_the_user_is_named():
    assert "bottleneck" not in told(ONE, DDP)
    assert "bottleneck: rank 1" in told(ONE, DDP, chosen=frozenset({"layout"}))
    assert "Without layout it is chosen" in told(replace(DDP, step_s=0.7), chosen=frozenset({"layout"}))
    assert "batches are not cut, since it keeps state" in told(ONE, whole="it keeps state", idle_ranks=(1,))
