"""Steps with distributions: graphs are closed, and give what the plain step gives, however they are cut."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from capture.sliced_runs import deviation_of_parts
from lightning_pipe.capture import Request, capture_step
from lightning_pipe.capture.closed_stages import closed, open_inputs
from lightning_pipe.capture.steps.batch import flatten
from lightning_pipe.errors import BrokenRouteError, CaptureError
from lightning_pipe.strategy.checks.captured_run import cut_up
from models.distribution_steps import DistributionStep

METHODS = ("training_step", "validation_step", "test_step", "predict_step")
PARTS = ((6,), (2, 2, 2))
LIMIT = 1e-9


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed >= 12)) for seed in range(200)])
def test_graphs_are_closed_and_give_the_numbers_of_the_plain_step(seed: int) -> None:
    torch.manual_seed(0)
    leaves, structure = flatten(torch.randn(6, 8))
    method, validates = METHODS[seed % 4], seed // 4 % 2 == 0
    module = DistributionStep(seed, validates=validates).train(method == "training_step")
    context = contextlib.nullcontext if module.training else torch.no_grad
    request = Request(module, method, structure, samples=2, context=context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            capture = capture_step(request)
        except CaptureError:  # it reads values, and is replayed
            return
    for split in (capture.split(()), cut_up(capture)):
        assert not open_inputs(split), (module.terms, module.origins, method)
    for sizes in PARTS if capture.is_exact else PARTS[:1]:
        off = deviation_of_parts(capture, request, leaves, sizes=sizes)
        assert off < LIMIT, (module.terms, module.origins, method, sizes)


def test_a_stage_that_reads_what_nothing_gives_it_is_named() -> None:
    """It ended in a KeyError when it ran, as a forward that asks for a value of the head did."""
    _, structure = flatten(torch.randn(6, 8))
    split = capture_step(Request(DistributionStep(1, validates=False), "training_step", structure)).split(())
    (stage,) = split.stages
    forward = replace(stage.forward, inputs=(*stage.forward.inputs, "head_eq_2"))
    assert not open_inputs(split)
    with pytest.raises(BrokenRouteError, match="stage 0: F reads head_eq_2"):
        closed(replace(split, stages=(replace(stage, forward=forward),)))
