"""Windows of accumulation that end with a skipped batch, weights of logged values, parameters that hooks replace."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import Raised, World
from strategy.fits import dapple, make_trainer

ROUNDING = 1e-9


class Net(pl.LightningModule):
    """Two layers, and a mean of the squares of what they make."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(batch))).square().mean()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class SkipsSecond(Net):
    """It skips the last batch of the first window, and the first of a later one."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return None if batch_idx in (1, 4) else self.loss(batch)


class Returned(pl.Callback):
    """Keep the losses, -1 for a batch that was skipped."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]) if outputs else -1.0)


class WeighsAlike(Net):
    """Its batches weigh alike in the mean of the epoch, whatever their samples."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("alike", loss, batch_size=3, on_step=False, on_epoch=True)
        self.log("by samples", loss, batch_size=len(batch), on_step=False, on_epoch=True)
        return loss


def fit(kind: type[Net], options: dict[str, Any] | None, trainer: dict[str, Any]) -> Any:
    """Return losses, logged values and weights."""
    module, seen = kind(), Returned()
    data = torch.randn(22, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    used = make_trainer("auto" if options is None else dapple(**options), max_epochs=1, callbacks=[seen], **trainer)
    used.fit(module, DataLoader(data, batch_size=4))
    logged = {name: float(value) for name, value in used.callback_metrics.items()}
    return seen.losses, logged, {name: value.tolist() for name, value in module.state_dict().items()}


REPLICAS = {"layout": "2", "microbatches": 2}
SETTINGS = [REPLICAS, {**REPLICAS, "shard_optimizer": "on"}, {"layout": "1-1"}, {**REPLICAS, "capture": "replay"}]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_a_window_that_ends_with_a_skipped_batch_has_the_gradients_of_all_replicas(options: dict[str, Any]) -> None:
    """Each replica stepped with its own gradients, and had weights of its own from then on."""
    trainer = {"accumulate_grad_batches": 2}
    losses, _, weights = fit(SkipsSecond, None, trainer)
    assert losses.count(-1.0) == 2
    for found in World(2).run(fit, SkipsSecond, {"microbatches": 2, **options}, trainer):
        assert found[0] == pytest.approx(losses, rel=ROUNDING)
        for name, value in weights.items():
            torch.testing.assert_close(found[2][name], value, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_a_batch_size_that_is_no_size_weighs_batches_alike(capture: str) -> None:
    _, logged, _ = fit(WeighsAlike, None, {})
    _, found, _ = fit(WeighsAlike, {"microbatches": 2, "capture": capture}, {})
    assert found == pytest.approx(logged, rel=ROUNDING)


class Decides(Net):
    """It writes to a frozen parameter and to a buffer, and decides by a loss that its first batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.one).requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.high = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.one.weight, 0.3).mul_(1.5)
            self.count += 1
        batch = batch * (1 if batch_idx % 4 == 1 else 3)
        loss = self.loss(batch) + 0.1 * (self.one(batch) * self.teacher(batch)).mean()
        if batch.abs().max() > 4:
            self.high = 1
        return loss


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_batch_that_is_run_again_begins_with_the_state_before_it(window: int) -> None:
    """Restored gradients were the snapshot's, which the next run changed; written parameters were not restored."""
    trainer = {"accumulate_grad_batches": window}
    losses, _, weights = fit(Decides, None, trainer)
    found = fit(Decides, {"microbatches": 2}, trainer)
    assert found[0] == pytest.approx(losses, rel=ROUNDING)
    for name, value in weights.items():
        torch.testing.assert_close(found[2][name], value, rtol=ROUNDING, atol=ROUNDING)


class ReplacesLayer(Net):
    def on_train_start(self) -> None:
        self.two = nn.Linear(8, 3).double()


class ReplacesParameter(Net):
    def on_train_epoch_start(self) -> None:
        self.two.weight = nn.Parameter(torch.ones(3, 8, dtype=torch.float64))


class AddsLayer(Net):
    def on_fit_start(self) -> None:
        self.three = nn.Linear(3, 3)


class Prunes(Net):
    def on_train_epoch_start(self) -> None:
        nn.utils.prune.l1_unstructured(self.one, "weight", 0.5)


class SetsOptimizers(Net):
    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


class AddsTeacher(Net):
    """A layer that the first step needs, so that the plan waits for it."""

    def on_train_start(self) -> None:
        self.teacher = copy.deepcopy(self.one).requires_grad_(False)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(batch) + (self.one(batch) - self.teacher(batch)).square().mean()


class Bare(torch.optim.Optimizer):
    """An optimizer around another one that leaves out its base."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class HasBareOptimizer(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Bare(super().configure_optimizers())


class ReplacesActivation(Net):
    """What has no parameters may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Tanh()

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 3:
            self.between = nn.Sigmoid()

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.two(self.between(self.one(batch))).square().mean()


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", [ReplacesLayer, ReplacesParameter, AddsLayer, Prunes, AddsTeacher])
def test_parameters_that_a_hook_replaces_are_named_on_all_ranks(kind: type[Net]) -> None:
    """Ranks went on with the old ones."""
    for found in World(2).results(fit, kind, {"layout": "1-1", "microbatches": 2}, {}):
        assert isinstance(found, Raised), found
        assert "has replaced, added or removed the parameter" in found.text, found.text


@pytest.mark.parametrize(
    ("kind", "words"), [(SetsOptimizers, "trainer.optimizers"), (HasBareOptimizer, "Bare.__init__")]
)
def test_optimizers_that_cannot_be_followed_are_named_on_all_ranks(kind: type[Net], words: str) -> None:
    for found in World(2).results(fit, kind, {"layout": "1-1", "microbatches": 2}, {}):
        assert isinstance(found, Raised), found
        assert "UnsupportedError" in found.kind and words in found.text, found


def test_what_has_no_parameters_may_be_replaced() -> None:
    losses, _, _ = fit(ReplacesActivation, None, {})
    for found in World(2).run(fit, ReplacesActivation, {"layout": "1-1", "microbatches": 2}, {}):
        assert found[0] == pytest.approx(losses, rel=ROUNDING)


class ZeroesGradients(Net):
    """A step that begins as one of a plain loop does."""

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        self.zero_grad()
        self.optimizers().zero_grad()
        return super().loss(batch)


@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_a_step_may_zero_gradients_where_none_are_gathered(capture: str) -> None:
    losses, _, _ = fit(ZeroesGradients, None, {})
    options = {"layout": "1-1", "microbatches": 2, "capture": capture}
    for found in World(2).run(fit, ZeroesGradients, options, {}):
        assert found[0] == pytest.approx(losses, rel=ROUNDING)


def test_a_step_that_zeroes_the_gradients_of_a_window_is_refused() -> None:
    for found in World(2).results(fit, ZeroesGradients, {"layout": "1-1"}, {"accumulate_grad_batches": 2}):
        assert isinstance(found, Raised) and "the gradient of a parameter" in found.text, found
