"""An explanation says which way to train is best, also where that is no pipeline."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lightning_pipe.report.account import accounts
from lightning_pipe.report.advice import Alternative
from lightning_pipe.report.explain import explain, sentences, time_sentences
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


VARIANTS = [
    (ONE, "Predicted speed-up on 2 devices: 1.60x (80% of linear); the bubble is 20%"),
    (replace(ONE, step_s=2.6), "Predicted speed-up on 2 devices: 2.60x (130% of linear); more than linear"),
    (replace(ONE, fits=False), "one device would need 5 GiB, which does not fit"),
    (replace(ONE, step_s=0.8), "one device fits and takes 0.80x the time of this plan: use devices=1"),
    (replace(ONE, step_s=1.1), "one device fits and is about as fast (1.10x the time): consider devices=1."),
    (DDP, "data parallel training takes 1.30x the time and sends 1 GiB per step instead of 10 MiB"),
    (replace(DDP, fits=False), "data parallel training does not fit; every device would need 6 GiB"),
    (
        replace(DDP, step_s=0.7),
        "data parallel training fits and takes 0.70x the time. Without layout it is chosen.",
    ),
    (OTHER, "the best other plan (gpipe, 8 micro-batches) takes 1.05x the time."),
    (replace(OTHER, fits=False), "takes 1.05x the time, but does not fit."),
    (MORE, "8 micro-batches instead of 4 take 0.95x the time, with a bubble of 10% instead of 20%"),
    (FEWER, "2 micro-batches instead of 4 take 1.20x the time, with a bubble of 33% instead of 20%"),
    (replace(MORE, fits=False), "with a bubble of 10% instead of 20%, which does not fit"),
]


@pytest.mark.parametrize(("other", "sentence"), VARIANTS)
def test_every_alternative_is_weighed(other, sentence):
    assert any(sentence in line for line in sentences([PLAN, other], timeline=RUN, chosen={"layout"}))


@pytest.mark.parametrize("step_s", [0.8, 1.1])
def test_one_device_is_another_training_than_that_of_weight_versions(step_s):
    """A plan says so first; who takes the advice for one device must leave versions, too."""
    first, advice, *_ = sentences([replace(PLAN, difference="Late."), replace(ONE, step_s=step_s)], timeline=RUN)
    assert first == "Late." and advice.endswith("devices=1 and versions='sync', which trains without late gradients.")


@pytest.mark.parametrize("plan", [PLAN, replace(PLAN, stages=1), replace(PLAN, fits=False, bubble=0.0)])
def test_every_sentence_with_a_number_says_that_it_is_predicted(plan):
    """A report shows them beside measured figures, with which they were mixed."""
    uneven = run_of(((0,), (1,)), Shaped(factors={(1, kind): 3.0 for kind in "FIW"}))
    for other, _ in VARIANTS:
        for sentence in sentences([plan, other], timeline=uneven):
            assert sentence.startswith("Predicted") or not re.search(r"\d", sentence), sentence
    assert all(sentence.startswith("Measured") for sentence in time_sentences(uneven, "Measured"))


@pytest.mark.parametrize("width", [60, 100])
def test_no_line_is_wider_than_asked_for(width):
    lines = explain([PLAN, ONE, DDP, OTHER, MORE], timeline=RUN, width=width).splitlines()
    assert max(map(len, lines)) <= width


def test_nobody_is_sent_to_another_strategy():
    """Without layout= this one trains data parallel itself."""
    for other, _ in VARIANTS:
        assert "strategy=" not in told(other)


@pytest.mark.parametrize("ratio", [0.9, 0.95, 1.0, 1.08, 1.14])
def test_what_predictions_cannot_tell_apart_is_about_as_fast(ratio):
    """Two starts of one script predicted 0.95 and 1.08, and the first called a pipeline the wrong choice."""
    data_parallel, one_device = told(replace(DDP, step_s=ratio)), told(replace(ONE, step_s=ratio))
    assert "about as fast" in data_parallel and "Without" not in data_parallel
    assert "about as fast" in one_device and "consider devices=1" in one_device


def test_memory_is_told_with_its_range():
    assert "Predicted memory: 2 GiB to 3 GiB per device." in told()
    assert "Predicted memory: 3 GiB per device, which does not fit." in told(
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
    assert f"Predicted: ranks spend {computing:.0%} computing, " in text
    assert "waiting for messages" in text and "overhead" not in text


def test_the_slowest_stage_is_named_if_the_cut_is_uneven():
    assert "bottleneck" not in told()
    uneven = run_of(((0,), (1,)), Shaped(factors={(1, kind): 3.0 for kind in "FIW"}))
    text = " ".join(explain([PLAN], timeline=uneven).split())
    assert "Predicted bottleneck: rank 1 (stage 1) computes 36 s per step, 1.50x the average." in text


def test_the_table_has_a_line_per_alternative():
    others = [ONE, DDP, OTHER, replace(MORE, fits=False)]
    rows = told(*others).splitlines()[-5:]
    assert [row.split("  ")[1].strip() for row in rows] == [a.name for a in (PLAN, *others)]
    assert [row.split()[-1] for row in rows] == ["yes", "yes", "yes", "yes", "no"]
    assert "1.60" in rows[1] and "1.6 s" in rows[1]
