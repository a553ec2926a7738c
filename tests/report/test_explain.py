"""An explanation says which way to train is best, also where that is no pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipe.report.account import accounts
from lightning_pipe.report.explain import Alternative, explain
from report.runs import Shaped, run_of

GIB = 2**30
PLAN = Alternative("this plan", "plan", 4, 1.0, (3 * GIB, 2 * GIB), True, 0.2, 10 * 2**20, 2)
ONE = Alternative("one device", "one device", 1, 1.6, (5 * GIB,), True, 0.0, 0, 1)
DDP = Alternative("data parallel", "data parallel", 1, 1.3, (6 * GIB, 6 * GIB), True, 0.0, GIB, 1)
OTHER = Alternative("gpipe, 8 micro-batches", "runner-up", 8, 1.05, (4 * GIB, 3 * GIB), True, 0.2, 10 * 2**20, 2)
MORE = replace(PLAN, name="8 micro-batches", kind="variant", microbatches=8, step_s=0.95, bubble=0.1)
FEWER = replace(PLAN, name="2 micro-batches", kind="variant", microbatches=2, step_s=1.2, bubble=0.33)
RUN = run_of(((0,), (1,)), Shaped(1.0, 1.3, 0.7, latency=0.4, reduction=0.5, step=0.5))


def told(*others: Alternative, plan: Alternative = PLAN) -> str:
    return explain([plan, *others], timeline=RUN)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (
            ONE,
            "1.60 times as fast as one device, on 2 (80% of the ideal). 2 devices are not 2 times as fast: ranks are "
            "idle for 20% of their span",
        ),
        (
            replace(ONE, step_s=2.6),
            "2.60 times as fast as one device, on 2 (130% of the ideal). That is more than they can share out: smaller "
            "parts are faster, or other work disturbed measurements.",
        ),
        (replace(ONE, fits=False), "One device is too small: it would need 5 GiB."),
        (
            replace(ONE, step_s=0.8),
            "One device is enough, and predicted to take 0.80 times the time of this plan: use devices=1.",
        ),
        (DDP, "Data parallel training is predicted to take 1.30 times the time; it sends 1 GiB per step instead of 10"),
        (replace(DDP, fits=False), "Data parallel training does not fit: every device would need 6 GiB."),
        (
            replace(DDP, step_s=0.7),
            "Data parallel training fits, and is predicted to take 0.70 times the time: a pipeline is the wrong choice "
            "here. Use strategy='ddp', or leave out layout and schedule: then it is chosen, if the step allows it.",
        ),
        (OTHER, "Another plan (gpipe, 8 micro-batches) would take 1.05 times the time."),
        (replace(OTHER, fits=False), "would take 1.05 times the time, but does not fit."),
        (
            MORE,
            "With more micro-batches (8 instead of 4) the bubble would be 10% instead of 20%, and the step take "
            "0.95 times the time.",
        ),
        (FEWER, "With fewer micro-batches (2 instead of 4) the bubble would be 33% instead of 20%"),
        (replace(MORE, fits=False), "0.95 times the time; that does not fit."),
    ],
)
def test_every_alternative_is_weighed(other, sentence):
    assert sentence in told(other)


@pytest.mark.parametrize("ratio", [0.9, 0.95, 1.0, 1.08, 1.14])
def test_what_predictions_cannot_tell_apart_is_about_as_fast(ratio):
    """Two starts of one script predicted 0.95 and 1.08, and the first called a pipeline the wrong choice."""
    data_parallel, one_device = told(replace(DDP, step_s=ratio)), told(replace(ONE, step_s=ratio))
    assert "about as fast" in data_parallel and "wrong choice" not in data_parallel
    assert "about as fast" in one_device and "consider devices=1" in one_device


def test_memory_is_told_with_its_range():
    assert "It needs 2 GiB to 3 GiB per device." in told()
    assert "It needs 3 GiB per device, which does not fit." in told(
        plan=replace(PLAN, peak_bytes=(3 * GIB, 3 * GIB), fits=False)
    )


def test_losses_are_shares_of_the_time_of_all_ranks():
    text = told()
    found = accounts(RUN)
    total = 2 * sum(
        (
            sum(found[0].computes.values()),
            sum(gap.late + gap.transfer + gap.overhead for gap in found[0].gaps),
            found[0].reduction + found[0].optimizer + found[0].drain,
        )
    )
    computing = sum(sum(account.computes.values()) for account in found) / total
    assert f"The ranks spend {computing:.0%} computing, " in text
    assert "waiting for messages on their way" in text and "overhead" not in text


def test_the_slowest_stage_is_named_if_the_cut_is_uneven():
    assert "sets the pace" not in told()
    uneven = run_of(((0,), (1,)), Shaped(factors={(1, kind): 3.0 for kind in "FIW"}))
    assert "Rank 1 (stage 1) sets the pace: it computes 36 s, 1.50 times the mean." in explain([PLAN], timeline=uneven)


def test_the_table_has_a_line_per_alternative():
    others = [ONE, DDP, OTHER, replace(MORE, fits=False)]
    rows = told(*others).splitlines()[-5:]
    assert [row.split("  ")[1].strip() for row in rows] == [a.name for a in (PLAN, *others)]
    assert [row.split()[-1] for row in rows] == ["yes", "yes", "yes", "yes", "no"]
    assert "1.60" in rows[1] and "1.6 s" in rows[1]
