"""A plan's activation policy is followed under the trainer, and changes no number."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.serial import save_yaml
from lightning_pipe.planner.registry import propose
from lightning_pipe.runtime.stage import Stage
from parity.policies import mixed, plan_of, swapping_problem, tight
from ranks.world import World
from strategy.fits import Case, Fitted, assert_same, dapple, fit, fit_as_pipeline, make_trainer, on_host
from strategy.small import Small, loader, run

SHORT = {"max_steps": 3, "limit_val_batches": 1}
PARTS = 4
ROUNDING = 1e-9  # float64: sums in another order, over some steps


def plan_for(name: str, layout: str, *, dropout: float) -> Plan:
    """Return a plan for any graph of the module with these names, some of whose micro-batches stay away for a while."""
    problem = swapping_problem(name, layout=layout, schedule="gpipe", microbatches=PARTS, dropout=dropout)
    plan = mixed(plan_of(problem), problem, recompute=0.6, offload=0.5, seed=name + layout)
    return replace(plan, graph="", stages=tuple(replace(stage, beside_copy=0) for stage in plan.stages))


@functools.cache
def on_one_device(name: str, dropout: float) -> Fitted:
    return fit(Case(name, {}, SHORT, dropout=dropout), dapple(microbatches=PARTS))


def fit_counting(case: Case) -> tuple[Fitted, int]:
    """Fit on all ranks of this world; return how often something was offloaded too; a worker function."""
    evicted, evict = [], Stage.evict
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "evict", lambda stage, *args: (evicted.append(1), evict(stage, *args))[1])
        return fit_as_pipeline(case), len(evicted)


@pytest.mark.parametrize(
    ("name", "layout", "dropout"),
    [
        ("gpt_tied", "1-1", 0.3),
        pytest.param("unet_skips", "1-1", 0.3, marks=pytest.mark.slow),
        pytest.param("gpt_tied", "2-1", 0.0, marks=pytest.mark.slow),  # replicas draw other dropout than one device
    ],
)
@on_host("the plan is made for the operators of the host")
def test_a_plan_that_recomputes_and_offloads_trains_as_one_device_does(name, layout, dropout, tmp_path: Path):
    plan = plan_for(name, layout, dropout=dropout)
    save_yaml(plan, tmp_path / "plan.yaml")
    case = Case(name, {"plan": str(tmp_path / "plan.yaml")}, SHORT, dropout=dropout)
    for found, evicted in World(plan.layout.ranks).run(fit_counting, case):
        assert_same(found, on_one_device(name, dropout), rtol=ROUNDING)
        assert evicted >= 3 * 2, "two of every step, or three"


REPLAYED = {
    "capture": "replay",
    "layout": "1",
    "schedule": "gpipe",
    "microbatches": PARTS,
}  # there is no cut to be moved


def fit_foreseeing(case: Case) -> tuple[Fitted, tuple[StagePlan, ...], int]:
    """Fit, and return the stages of the plan and the foreseen peak too."""
    strategy = dapple(**case.options)
    found = fit(case, strategy)
    return found, strategy.plan.stages, max(one.peak_bytes for one in strategy.foreseen)


def test_a_replayed_step_recomputes_units_under_a_limit_and_trains_as_one_device_does():
    case = Case("gpt_tied", REPLAYED, SHORT)
    _, (stage,), peak = fit_foreseeing(case)
    assert not stage.recompute
    limit = round(0.85 * peak)
    found, (stage,), less = fit_foreseeing(replace(case, options={**REPLAYED, "memory_limit": f"{limit}B"}))
    assert stage.recompute and not stage.offload
    assert less <= limit
    assert_same(found, on_one_device("gpt_tied", 0.0), rtol=ROUNDING)


class Told(nn.Module):
    """Multiplies by what the step has told its parent, and left there."""

    def __init__(self, parent: pl.LightningModule) -> None:
        super().__init__()
        self.parents, self.weight = [parent], nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, x):
        return torch.tanh(x * self.weight * self.parents[0].rate)


class Telling(pl.LightningModule):
    """Tells a unit something else in every batch."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.rate, self.first, self.last, self.checkpoints = 1.0, nn.Linear(4, 4), nn.Linear(4, 1), checkpoints
        self.told = Told(self)

    def training_step(self, batch, batch_idx):
        self.rate, x = 1.0 + batch_idx, self.first(batch[0])
        x = checkpoint(self.told, x, use_reentrant=False) if self.checkpoints else self.told(x)
        return self.last(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


PLAN = """\
stages:
- {at: '', ranks: [0], recompute: AGAIN}
- {at: last, ranks: [1]}
microbatches: 2
"""


def told(options: dict[str, Any], checkpoints: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    module, data = Telling(checkpoints=checkpoints), DataLoader(TensorDataset(torch.randn(16, 4)), 4)
    make_trainer(dapple(**options) if options else "auto", max_epochs=1).fit(module, data)
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_unit_that_runs_again_finds_what_the_step_has_told_it(checkpoints, tmp_path: Path):
    """The state of the module in the backward is that before the batch."""
    (tmp_path / "plan.yaml").write_text(PLAN.replace("AGAIN", "[]" if checkpoints else "[told]"))
    expected = told({}, checkpoints)
    for found in World(2).run(told, {"plan": str(tmp_path / "plan.yaml"), "capture": "replay"}, checkpoints):
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
def test_so_does_one_of_which_some_micro_batches_are_offloaded(tmp_path: Path):
    problem = swapping_problem("gpt_tied", layout="1-1", schedule="milp", microbatches=4, dropout=0.3)
    plan = propose(tight(problem, share=0.7), "uniform")[0].plan
    copies = sum(line.count("VACATE") for line in plan.order)
    assert 0 < copies < 4 * sum(bool(stage.offload) for stage in plan.stages)
    save_yaml(replace(plan, graph=""), tmp_path / "plan.yaml")
    expected = fit(Case("gpt_tied", {}, SHORT, dropout=0.3), dapple(microbatches=4))
    case = Case("gpt_tied", {"plan": str(tmp_path / "plan.yaml")}, SHORT, dropout=0.3)
    evictions = 0
    for found, evicted in World(2).run(fit_counting, case):
        assert_same(found, expected, rtol=ROUNDING)
        evictions += evicted
    assert evictions == 3 * copies, "of every step"


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
def test_so_does_one_whose_ranks_run_ahead_and_take_steps_back(tmp_path: Path):
    save_yaml(plan_for("gpt_tied", "1-1", dropout=0.3), tmp_path / "plan.yaml")
    clipped = {**SHORT, "max_steps": 6, "gradient_clip_val": 0.05}
    expected = fit(Case("gpt_tied", {}, clipped, dropout=0.3), dapple(microbatches=PARTS))
    case = Case("gpt_tied", {"plan": str(tmp_path / "plan.yaml"), "post_validation": True}, clipped, dropout=0.3)
    for found, evicted in World(2).run(fit_counting, case):
        assert_same(found, expected, rtol=ROUNDING)
        assert evicted >= 6 * 3, "those of programs that were given up are evicted again"


class Residual(Small):
    """Blocks whose outputs the step adds up."""

    validation = staticmethod(lambda: loader(6, 4, 2))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(3))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch))


def fit_residual(plan: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit by a plan; a worker function."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = run(Residual, None if options is None else {**options, "plan": plan})
    assert not [1 for one in caught if "cannot recompute" in str(one.message)]
    return found


def test_a_replayed_step_recomputes_of_a_unit_what_the_step_itself_does_not_read(tmp_path):
    """A unit by its path was refused where the step reads its output, and validation warned of."""
    stages = (StagePlan("", (0,), recompute=("blocks.0",)), StagePlan("blocks.2", (1,)))
    save_yaml(Plan(stages, 2, "1f1b", {"warmup": "pa"}), tmp_path / "plan.yaml")
    losses, _, metrics, parameters = fit_residual("", None)
    for found in World(2).run(fit_residual, str(tmp_path / "plan.yaml"), {"capture": "replay"}):
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[2] == pytest.approx(metrics, rel=1e-6)
        torch.testing.assert_close(found[3], parameters, rtol=1e-9, atol=1e-9)
