"""Laws of ranks that do not wait for each other between steps: everything is as if they did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import DappleStrategy
from lightning_pipe.errors import PipeError, UnsupportedError
from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer
from strategy.optimizer_kinds import TRAINED

WIDTH, SAMPLES = 6, 8
CALM = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
WILD = (1.0, 1.0, 40.0, 1.0, 1.0, 40.0)  # scale of each batch: some gradients are much too long


class Net(pl.LightningModule):
    """Batch statistics, dropout, weight decay, a learning rate that changes with every step."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(WIDTH, 1)
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        hidden = self.drop(torch.tanh(self.second(self.norm(torch.tanh(self.first(x))))))
        loss = nn.functional.mse_loss(self.last(hidden), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", nn.functional.mse_loss(self.last(torch.tanh(self.second(self.norm(self.first(x))))), y))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            optimizer: Any = torch.optim.AdamW(self.parameters(), lr=0.05)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Keep(pl.Callback):
    """Keep the weights that a checkpoint would have after every step, which makes every step settle."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.weights.append({n: w.clone() for n, w in trainer.strategy.lightning_module_state_dict().items()})


@dataclass(frozen=True)
class Run:
    """A fit: what the batches are like, and what the strategy and the trainer are told."""

    scales: tuple[float, ...] = WILD
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    keeps: bool = False


@dataclass
class Left:
    """What a fit has left."""

    weights: dict[str, torch.Tensor]
    losses: list[float]
    taken_back: int
    kept: list[dict[str, torch.Tensor]]
    metrics: dict[str, float]


def loader(scales: tuple[float, ...]) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(scales), SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = x.sum(-1, keepdim=True) * torch.tensor(scales, dtype=torch.float64)[:, None, None]
    return DataLoader(TensorDataset(x.flatten(0, 1), y.flatten(0, 1)), batch_size=SAMPLES)


def fit(run: Run, strategy: Any) -> Left:
    module, losses, keep = Net(run.optimizer).double(), Losses(), Keep()
    callbacks = [losses, keep] if run.keeps else [losses]
    options = {"max_epochs": 2, "gradient_clip_val": 15.0, **run.trainer}
    trainer = make_trainer(strategy, callbacks=callbacks, **options)
    trainer.fit(module, loader(run.scales), loader(CALM[:2]) if "val_check_interval" in run.trainer else None)
    taken_back = strategy.steps_taken_back if isinstance(strategy, DappleStrategy) else 0
    weights = {name: w.detach().clone() for name, w in module.state_dict().items()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return Left(weights, losses.losses, taken_back, keep.weights, metrics)


def fit_on_ranks(run: Run) -> Left:
    return fit(run, dapple(seed=3, **run.options))


def both(run: Run, ranks: int = 2) -> tuple[list[Left], list[Left]]:
    """Return what is left of a fit whose ranks run ahead, and of one whose ranks wait."""
    world = World(ranks)
    waiting = {**run.options, "post_validation": False}
    return world.run(fit_on_ranks, run), world.run(fit_on_ranks, Run(**{**vars(run), "options": waiting}))


def assert_equal(found: list[Left], expected: list[Left]) -> None:
    for ahead, waiting in zip(found, expected, strict=True):
        torch.testing.assert_close(ahead.losses, waiting.losses, rtol=0, atol=0, equal_nan=True)
        assert ahead.metrics == pytest.approx(waiting.metrics, rel=0, abs=0, nan_ok=True)
        for name, value in waiting.weights.items():
            torch.testing.assert_close(ahead.weights[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


OPTIONS = {
    "zb_h2": {"schedule": "zb_h2", "layout": "1-1", "microbatches": 4},
    "gpipe": {"schedule": "gpipe", "layout": "1-1", "microbatches": 2},
    "zb_v": {"schedule": "zb_v", "microbatches": 4},
    "2-1": {"layout": "2-1", "microbatches": 2},
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_that_are_taken_back_and_taken_again_leave_what_waiting_leaves(options):
    run = Run(options={**options, "post_validation": True})
    found, expected = both(run, ranks=sum(map(int, options.get("layout", "1-1").split("-"))))
    assert {left.taken_back for left in found} == {2}  # that of batch 2 in each epoch; batch 5 is the last one
    assert {left.taken_back for left in expected} == {0}
    assert_equal(found, expected)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("run", "takes_back"),
    [
        (Run(scales=CALM, trainer={"gradient_clip_val": 1e6}), False),
        (Run(trainer={"gradient_clip_val": None}), False),
        (Run(trainer={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}), False),
        (Run(trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 15.0}), True),
        (Run(optimizer="sgd", trainer={"val_check_interval": 3}), True),
        (Run(scales=(1.0, 1.0, float("nan"), 1.0)), True),
        (Run(trainer={"max_steps": 3}), False),
    ],
    ids=["calm", "no clipping", "by value", "accumulated", "sgd", "no number", "last step"],
)
def test_whatever_the_trainer_clips(run, takes_back):
    found, expected = both(Run(**{**vars(run), "options": {**OPTIONS["zb_h2"], "post_validation": True}}))
    assert_equal(found, expected)
    assert [left.taken_back > 0 for left in found] == [takes_back] * 2


def test_who_reads_weights_between_steps_gets_those_that_stay():
    run = Run(options={**OPTIONS["zb_h2"], "post_validation": True}, keeps=True)
    found, expected = both(run)
    assert_equal(found, expected)
    for ahead, waiting in zip(found[0].kept, expected[0].kept, strict=True):
        assert all(torch.equal(ahead[name], value) for name, value in waiting.items())


class RoughNet(Net):
    """A hook after the optimizer's step writes into gradients."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        optimizer.register_step_post_hook(self.halve)
        return optimizer

    def halve(self, *_: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class CountingNet(Net):
    """A wrapper that counts, of which nobody knows what a step changes."""

    def configure_optimizers(self) -> Any:
        return TRAINED["Counting"](self)


class Clips(Net):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=1.0)


def failing_fit(kind: type[Net]) -> str:
    trainer = make_trainer(
        dapple(layout="1-1", microbatches=2, post_validation=True), max_epochs=1, gradient_clip_val=1e6
    )
    with pytest.raises(PipeError) as caught:
        trainer.fit(kind().double(), loader(CALM))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_what_writes_into_gradients_is_named():
    for said in World(2).run(failing_fit, RoughNet):
        assert "SGD, or a hook after its step" in said and "post_validation=False" in said


def test_a_step_of_no_optimizer_of_torch_is_taken_back():
    for said in World(2).run(failing_fit, CountingNet):
        assert said.startswith(UnsupportedError.__name__) and "Counting is no optimizer of torch.optim" in said


def test_a_hook_that_clips_by_itself_is_refused():
    for said in World(2).run(failing_fit, Clips):
        assert said.startswith(UnsupportedError.__name__) and "configure_gradient_clipping" in said
