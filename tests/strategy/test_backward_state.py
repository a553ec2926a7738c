"""Whatever Python a backward reads: training is that of one device, or is refused before it begins."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_pipe.errors import CaptureError, PlanError, UnsupportedError
from ranks.world import World
from strategy.backward_steps import TOO_LARGE, BackwardStep, some_steps
from strategy.fits import dapple, make_trainer

BATCHES, SAMPLES = 4, 4
ROUNDING = {"rtol": 1e-9, "atol": 1e-12}
NUMBERS = itertools.count()
STEPS = some_steps(60, seed=3)
ON_TWO_STAGES = [
    BackwardStep("list of the function", "Function", "every batch", "factor"),
    BackwardStep("list of an object", "Function with setup_context", "in the step", "factor"),
    BackwardStep("closure", "hook on a parameter", "in the step", "branch"),
]


@dataclass
class Fit:
    """What a fit leaves: steps, weights, and what it has raised ("" for nothing)."""

    steps: int
    weights: list[torch.Tensor]
    error: str
    is_refused: bool


def fitted(step: BackwardStep, folder: Path, options: dict[str, Any] | None) -> Fit:
    """Fit on one device, or as a pipeline on the ranks of this world."""
    path = folder / f"user{next(NUMBERS)}.py"
    path.write_text(step.source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    users = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(users)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64) for _ in range(BATCHES)]
    data = [{"x": x, "y": torch.randint(0, 4, (SAMPLES,), generator=generator)} for x in inputs]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = users.Net().double()
    strategy = "auto" if options is None else dapple(cache="off", microbatches=2, **options)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[users.Change()], num_sanity_val_steps=0)
    error, is_refused = "", False
    try:
        trainer.fit(module, DataLoader(data, batch_size=None))
    except Exception as raised:
        error, is_refused = str(raised), isinstance(raised, (CaptureError, PlanError, UnsupportedError))
    del sys.modules[path.stem]
    return Fit(trainer.global_step, [p.detach().clone() for p in module.parameters()], error, is_refused)


def assert_same(found: Fit, expected: Fit) -> None:
    """Compare two fits; one that was refused has done nothing."""
    if found.is_refused and TOO_LARGE not in found.error:
        assert found.steps == 0, found.error
        return
    assert (TOO_LARGE in found.error) == (TOO_LARGE in expected.error), found.error or expected.error
    assert bool(found.error) == bool(expected.error), found.error or expected.error
    assert found.steps == expected.steps
    for one, two in zip(found.weights, expected.weights, strict=True):
        torch.testing.assert_close(one, two, **ROUNDING)


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.where}, {step.reader}, {step.when}, {step.what}")
def test_what_a_backward_reads_is_what_it_reads_on_one_device(step: BackwardStep, tmp_path: Path) -> None:
    """A list that a custom function read in its backward was frozen as the first step had seen it."""
    assert_same(fitted(step, tmp_path, {}), fitted(step, tmp_path, None))


def all_fitted(steps: list[BackwardStep], folder: Path) -> list[Fit]:
    """Fit several steps on all ranks of this world; a worker function."""
    torch.distributed.barrier()
    own = folder / str(torch.distributed.get_rank())
    own.mkdir()
    return [fitted(step, own, {"layout": "1-1"}) for step in steps]


def test_on_two_stages_a_backward_reads_what_it_reads_on_one_device(tmp_path: Path) -> None:
    plain = [fitted(step, tmp_path, None) for step in ON_TWO_STAGES]
    for found in World(2).run(all_fitted, ON_TWO_STAGES, tmp_path):
        for one, two in zip(found, plain, strict=True):
            assert not one.error, one.error
            assert_same(one, two)
