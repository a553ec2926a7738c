"""A check that has passed is made again wherever anything that it depends on may differ, and not otherwise."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.errors import CaptureError
from lightning_pipe.strategy import step_check
from strategy.fits import checked, make_trainer

WIDTH = 6


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


class Chain(pl.LightningModule):
    """Two linear layers with something between them, a buffer, and a number that the step reads."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.between, self.factor = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), between, 1.0
        self.register_buffer("shift", torch.zeros(WIDTH))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.two(self.between(self.one(batch) + self.shift)).square().mean() * self.factor

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that fits one batch, and returns how often it compared the captured step with the plain one."""
    compared: list[int] = []
    check = step_check.check_captured

    def counting(*args: Any, **options: Any) -> Any:
        compared.append(1)
        return check(*args, **options)

    monkeypatch.setattr(step_check, "check_captured", counting)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)  # a worker of xdist has none

    def fit(
        change: Callable[[Chain, torch.Tensor], None] = lambda module, batch: None,
        between: Callable[[torch.Tensor], torch.Tensor] = as_it_is,
        **options: Any,
    ) -> int:
        before = len(compared)
        torch.manual_seed(3)
        module, batch = Chain(between), torch.randn(8, WIDTH)
        with torch.no_grad():
            change(module, batch)
        strategy = checked(**{"capture": "joint", "microbatches": 2, "seed": 1, "cache": str(tmp_path), **options})
        make_trainer(strategy, max_steps=1).fit(module, DataLoader(batch, batch_size=8))
        return len(compared) - before

    return fit


def other_number(module: Chain, batch: torch.Tensor) -> None:
    module.factor = 2.0


def test_a_check_is_made_once_for_the_very_same_and_again_for_anything_else(fit: Callable[..., int]) -> None:
    assert (fit(), fit()) == (1, 0)
    assert fit(recheck=True) == 1
    assert (fit(microbatches=4), fit(seed=2), fit(other_number)) == (1, 1, 1)
    assert fit() == 0  # the others are other checks
    for tensor in (lambda module, batch: batch, lambda module, batch: module.one.weight, lambda m, b: m.shift):
        assert fit(lambda module, batch, tensor=tensor: tensor(module, batch)[0].add_(1e-6)) == 1
    assert fit(cache="off") == 1


def test_what_runs_from_no_file_is_compared_at_every_start(
    fit: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a notebook, or of `python -c`, nothing tells that its code is another."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert (fit(), fit()) == (1, 1)


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file of a module whose code only the plain step runs."""
    path = tmp_path / "only_the_plain_step.py"
    path.write_text("def run(x):\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield path
    sys.modules.pop("only_the_plain_step", None)


def by_the_helper(x: torch.Tensor) -> torch.Tensor:
    return x if torch.compiler.is_compiling() else importlib.import_module("only_the_plain_step").run(x)


def test_code_that_no_capture_has_seen_is_checked_again_when_it_changes(fit: Callable[..., int], helper: Path) -> None:
    """Of a step that hides from the tracer neither graph nor identity tell that a function of its own is another."""
    assert [fit(between=by_the_helper) for _ in range(2)] == [1, 0]
    helper.write_text("def run(x):\n    return 2 * x\n")
    os.utime(helper, ns=(0, 0))
    sys.modules.pop("only_the_plain_step")
    importlib.invalidate_caches()
    with pytest.raises(CaptureError, match="gives other results than the plain step"):
        fit(between=by_the_helper)
