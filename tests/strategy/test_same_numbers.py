"""Two starts of one script train the same: what a stopwatch says decides no numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.core.plan import Plan
from lightning_pipe.planner.problem import Problem
from lightning_pipe.strategy.plans.plan_costs import PlanCosts
from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer

SAMPLES = 64


class Normalised(pl.LightningModule):
    """Convolutions with batch statistics, and dropout in front of a layer without them."""

    def __init__(self, dropout: float = 0.0, *, has_statistics: bool = True) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return nn.BatchNorm2d(4) if has_statistics else nn.Identity()

        self.net = nn.Sequential(
            *(nn.Conv2d(1, 4, 3), norm(), nn.ReLU(), nn.Conv2d(4, 4, 3), norm(), nn.ReLU(), nn.Flatten()),
            *(nn.Dropout(dropout), nn.Linear(64, 16), nn.Dropout(dropout), nn.Linear(16, 3)),
        )
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, classes = batch
        return F.cross_entropy(self.net(images), classes)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ByPython(Normalised):
    """The same with a branch on a tensor's value inside, which no graph holds."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for number, layer in enumerate(self.net):
            made = layer(batch[0] if number == 0 else made)  # noqa: F821
        return F.cross_entropy(made, batch[1])


def under_load(load: int) -> Callable[..., Problem | None]:
    """Return a stand-in of `PlanCosts._measured`: what a stopwatch may say while other work takes the processor."""
    draw = random.Random(load)
    scales = {samples: 10 ** draw.uniform(-1.5, 1) for samples in (4, 32, SAMPLES)}

    def disturbed(self: PlanCosts, capture: Any, problem: Problem, **_: Any) -> Problem | None:
        counted = problem.profile
        seconds = tuple(
            tuple(counted.operation_s(o, samples) * scale for samples, scale in scales.items())
            for o in range(len(counted.seconds))
        )
        profile = replace(counted, samples=tuple(scales), seconds=seconds, source="measured")
        return replace(problem, profile=profile) if self._links.control.rank == 0 else None

    return disturbed


def trained(
    make: Callable[[], pl.LightningModule], options: dict[str, Any] | None, *, load: int = 0, samples: int = SAMPLES,
    **trainer: Any,
) -> tuple[list[float], list[torch.Tensor], Plan | None]:  # fmt: skip
    """Train two epochs, a start of its own; return losses, the state and the plan."""
    torch.manual_seed(1)
    module = make()
    draws = torch.Generator().manual_seed(2)
    images = torch.randn(2 * samples + 20, 1, 8, 8, generator=draws, dtype=torch.float64)
    data = TensorDataset(images, torch.randint(3, (len(images),), generator=draws))
    losses = Losses()
    strategy = "auto" if options is None else dapple(**{"planner": "auto", "seed": 3, **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanCosts, "_measured", under_load(load))
        fit = make_trainer(strategy, max_epochs=2, callbacks=[losses], **trainer)
        try:
            fit.fit(module, DataLoader(data, samples), DataLoader(data, samples))
        finally:
            torch.use_deterministic_algorithms(False)
    state = [tensor.detach().clone() for tensor in module.state_dict().values()]
    return losses.losses, state, getattr(fit.strategy, "plan", None)


MEASURED = {"costs": "measured", "cache": "off", "timeline_steps": 1}


def starts(ranks: int, make: Callable[[], pl.LightningModule], loads: Sequence[int], **options: Any) -> list[Any]:
    """Return rank 0's losses, state and plan of starts under other loads."""
    return [World(ranks).run(partial(trained, load=load, **options), make, MEASURED)[0] for load in loads]


@pytest.mark.parametrize(("ranks", "loads"), [(2, (0, 1)), (3, (4, 5))])
def test_no_load_changes_what_a_module_with_batch_statistics_trains(ranks, loads):
    """Its plan had 1, 2 or 32 micro-batches of 64 samples, by what the stopwatch said."""
    (losses, state, plan), (other_losses, other_state, other_plan) = starts(ranks, partial(Normalised, 0.3), loads)
    assert other_plan.microbatches == plan.microbatches == ranks
    torch.testing.assert_close(other_losses, losses, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(other_state, state, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [partial(Normalised, 0.3, has_statistics=False), partial(ByPython, 0.3)])
def test_a_deterministic_trainer_makes_one_plan_and_one_result(make):
    (losses, state, plan), (other_losses, other_state, other_plan) = starts(2, make, (0, 1), deterministic=True)
    assert (other_losses, other_plan) == (losses, plan)
    torch.testing.assert_close(other_state, state, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"layout": "1-1", "microbatches": 4}, {"capture": "replay"}], ids=str)
def test_exact_is_one_device_with_batch_statistics(options):
    expected_losses, expected, _ = trained(Normalised, None)
    for losses, state, plan in World(2).run(trained, Normalised, {**options, "whole_batch": "exact"}):
        assert plan.microbatches == 1
        torch.testing.assert_close(losses, expected_losses, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(state, expected, rtol=1e-9, atol=1e-9)


def test_what_sees_parts_is_said_with_numbers_and_the_way_out(monkeypatch):
    told: list[str] = []
    monkeypatch.setattr("lightning_pipe.strategy.plans.plan_warnings.rank_zero_warn", told.append)
    trained(Normalised, {"layout": "1", "microbatches": 8})
    assert len(told) == 1, told
    assert "BatchNorm2d net.1 (and 1 more) sees 8 of 64 samples" in told[0] and "whole_batch='exact': all 64" in told[0]


def few_samples() -> list[str]:
    """Return what rank 0 warns of where the batch has 24 samples."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_pipe.strategy.plans.plan_warnings.rank_zero_warn", told.append)
        trained(Normalised, {}, samples=24)
    return told


def test_a_batch_that_is_too_small_to_be_cut_is_said():
    (said,) = World(2).run(few_samples)[0]
    assert (
        "the batch of 24 is one micro-batch" in said
        and "microbatches=2 cuts it: BatchNorm2d net.1 then sees 12" in said
    )
