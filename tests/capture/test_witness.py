"""A step that runs again beside its graph: with numbers for sizes first, with symbols only where it seems to differ."""

from __future__ import annotations

import os
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch

from lightning_pipe.capture import Capture, Request, capture_step, flatten
from lightning_pipe.capture.graphs import trace, witness


class Scaled(pl.LightningModule):
    """What it does depends on the environment, which no guard watches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        y = self.layer(batch)
        return y.repeat(1, y.shape[0] + 1).mul(int(os.environ.get("TIMES", "1"))).sum() / len(batch)


@pytest.fixture
def runs(monkeypatch) -> list[bool]:
    """Whether sizes were symbols, of every run of a step on fake tensors."""
    seen = []

    def run(request, answers):
        seen.append(request.symbolic)
        return trace.run_on_fakes(request, answers)

    monkeypatch.setattr(witness, "run_on_fakes", run)
    return seen


def captured(module: pl.LightningModule, batch: torch.Tensor, **options) -> tuple[Capture, Request]:
    request = Request(module, "training_step", flatten(batch)[1], samples=4, **options)
    return capture_step(request), request


def test_a_step_that_does_the_same_is_run_with_numbers_alone(runs):
    capture, request = captured(Scaled(), torch.zeros(8, 3))
    assert capture.testimony(request) == ""
    assert runs == [False]


def test_a_step_that_does_something_else_is_seen(runs, monkeypatch):
    capture, request = captured(Scaled(), torch.zeros(8, 3))
    monkeypatch.setenv("TIMES", "2")
    assert "changes from call to call" in capture.testimony(request)
    assert runs == [False, True]


class Repeated(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).flatten(1).repeat(1, batch.shape[1]).mean()


def test_symbols_decide_for_another_length(runs):
    """The graph holds for all lengths; the numbers of this one are not those that it was traced with."""
    capture, request = captured(Repeated(), torch.zeros(8, 5, 3), lengths=frozenset({(0, 1)}))
    longer = replace(request, structure=flatten(torch.zeros(8, 7, 3))[1])
    assert capture.general is not None
    assert capture.testimony(longer) == ""
    assert runs == [False, True]
