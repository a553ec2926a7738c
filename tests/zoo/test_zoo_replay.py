"""Steps that no graph can hold are replayed, with the gradients of the plain module; what cannot be is refused.

And so are steps that a graph can hold: both routes give what the plain module gives.
"""

from __future__ import annotations

import functools

import pytest
import torch

from lightning_pipe.capture.replayed.replay_needs import uncuttable
from lightning_pipe.errors import CaptureError
from zoo import ZOO
from zoo.replaying import Replayed, even_cuts, run_plainly, run_replayed, traced
from zoo.test_zoo_pipelines import JOINT, REFUSED, made, sizes_of

SAME = 1e-6
EQUAL = {"tbptt_hidden_state", "demo_lstm_tbptt"}  # the state of a micro-batch fits the next of the same size only
OTHERWISE = {
    "gradient_penalty": "calls no sub-module that could run on a rank of its own",  # by the other route
}
RUNS = ((2, 2, "gpipe"), (3, 3, "1f1b"), (2, 4, "interleaved"))  # ranks, stages, schedule


@functools.cache
def replayed(name: str) -> Replayed:
    module, batch = made(name)
    if name in EQUAL:
        batch = ZOO[name].make_batch(6)
    return traced(module, batch, sizes_of(batch))


def check_replayed(found: Replayed) -> None:
    """Cut a traced module as evenly as possible, and compare losses and gradients with the plain module."""
    losses, gradients = run_plainly(found)
    places = [(run, even_cuts(found.trace, uncuttable(found.trace), run[1])) for run in RUNS]
    possible = [(run, cuts) for run, cuts in places if cuts is not None] or [((1, 1, "gpipe"), ())]
    for (ranks, _, schedule), cuts in possible:
        got_losses, got = run_replayed(found, ranks=ranks, schedule=schedule, cuts=cuts)
        where = f"{schedule} cut at {cuts}"
        for m, (one, two) in enumerate(zip(got_losses, losses, strict=True)):
            torch.testing.assert_close(
                one, two, rtol=SAME, atol=SAME, msg=lambda t, m=m, w=where: f"loss {m}, {w}: {t}"
            )
        assert got.keys() == gradients.keys(), where
        for parameter, gradient in gradients.items():
            scale = max(1.0, float(gradient.abs().max()))
            difference = float((got[parameter] - gradient).abs().max())
            assert difference <= SAME * scale, f"{parameter} differs by {difference} of {scale}, {where}"
        if schedule == possible[0][0][2]:
            again = run_replayed(found, ranks=ranks, schedule=schedule, cuts=cuts, recompute=True)
            torch.testing.assert_close(again, (got_losses, got), rtol=0, atol=0, equal_nan=True)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", [n for n in (*REFUSED, *JOINT) if n not in OTHERWISE])
def test_a_replayed_step_has_the_gradients_of_the_plain_module(name):
    check_replayed(replayed(name))


@pytest.mark.parametrize("name", OTHERWISE)
def test_a_step_that_cannot_be_replayed_is_refused(name):
    with pytest.raises(CaptureError, match=OTHERWISE[name]):
        replayed(name)


def test_most_of_the_zoo_is_cut_into_several_stages():
    """One-unit modules are few."""
    alone = [n for n in (*REFUSED, *JOINT) if n not in OTHERWISE and len(replayed(n).trace.units) == 1]
    assert len(alone) <= 3, alone


@pytest.mark.parametrize("name", ["mlp_classifier", "nanogpt_tied", "scaled_by_value"])
def test_a_stage_may_have_no_units(name):
    """As where a step is replayed under a plan that was made for its graph."""
    found = replayed(name)
    losses, gradients = run_plainly(found)
    count = len(found.trace.units)
    for cuts in ((1, count), (0, 1), (1, 1)):
        got_losses, got = run_replayed(found, ranks=3, schedule="1f1b", cuts=cuts)
        torch.testing.assert_close(got_losses, losses, rtol=SAME, atol=SAME)
        assert got.keys() == gradients.keys(), cuts
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(got[parameter], gradient, rtol=SAME, atol=SAME, msg=f"{parameter}, {cuts}")
