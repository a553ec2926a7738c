"""Averages of weights equal those of one device, however the weights are spread, and are nowhere read by mistake."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as cb
from torch import nn

from lightning_pipe.errors import AbsentError
from ranks.world import Raised, World
from strategy.compat_project import CLASSES, Net, loader
from strategy.fits import dapple, make_trainer

pytestmark = pytest.mark.skipif(not hasattr(cb, "EMAWeightAveraging"), reason="newer than this Lightning")


class Spread(Net):
    """Weights that two parts share, and buffers: one that training changes in the middle, a counter, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 8).double()
        self.again.weight = self.head[0].weight
        self.backbone.register_buffer("growing", torch.ones(8, dtype=torch.float64))
        self.again.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("fixed", torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(torch.tanh(self.backbone(x) * self.backbone.growing)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.again.steps += 1
        self.backbone.growing.mul_(1.1)
        return super().training_step(batch, batch_idx)


class Built(Net):
    """Layers that are made in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = None

    def configure_model(self) -> None:
        if self.head is None:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                self.head = nn.Sequential(nn.Linear(8, CLASSES)).double()


class Peeking(cb.EMAWeightAveraging):
    """Reads an average that may be elsewhere."""

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        for parameter in self._average_model.parameters():
            float(parameter.sum())


class Inside(cb.EMAWeightAveraging):
    """Averages while every rank has all weights, though not all averages."""

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        with getattr(trainer.strategy, "whole_module", contextlib.nullcontext)():
            super().on_train_batch_end(trainer, *arguments)


def average(**options: Any) -> cb.Callback:
    return cb.EMAWeightAveraging(decay=0.8, **options)


def stochastic() -> cb.Callback:
    return cb.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2)


CASES: dict[str, tuple[type, Any, dict[str, Any], dict[str, Any]]] = {
    "replicas that share optimizer state": (Spread, average, {"layout": "2-1", "shard_optimizer": "on"}, {}),
    "steps that are taken back": (
        Net, average, {"layout": "1-1-1", "post_validation": True}, {"gradient_clip_val": 0.05}),
    "averages on the host": (Spread, lambda: average(device="cpu"), {"layout": "1-2"}, {}),
    "no buffers, every second step": (
        Spread, lambda: average(use_buffers=False, update_every_n_steps=2, update_starting_at_step=2), {}, {}),
    "a module built in configure_model": (Built, average, {}, {}),
    "replay": (Net, average, {"capture": "replay"}, {}),
    "inside whole_module()": (Spread, lambda: Inside(decay=0.8), {}, {}),
    "no rank gets the whole module": (Net, average, {"restore": "none"}, {}),
    "the first rank gets the whole module": (Net, average, {"restore": "first"}, {}),
    "averages of epochs, on three stages": (Net, stochastic, {"layout": "1-1-1"}, {}),
    "averages of epochs, with a summary": (Net, stochastic, {"layout": "2-1"}, {"accumulate_grad_batches": 2}),
}  # fmt: skip


def run(case: str, folder: str, is_pipeline: bool) -> list[dict[str, Any]]:
    """Fit, test and resume with averages, and return the checkpoints that were saved on the way."""
    kind, make, strategy, options = CASES[case]
    saved = []
    for part, epochs in enumerate((2, 3)):
        torch.manual_seed(5)
        plan = dapple(**{"layout": "1-1-1", "microbatches": 1, **strategy}) if is_pipeline else "auto"
        trainer = make_trainer(plan, max_epochs=epochs, callbacks=[make()], **options)
        module = kind()
        trainer.fit(module, loader(), loader(), ckpt_path=f"{folder}/0.ckpt" if part else None)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainer.save_checkpoint(f"{folder}/{part}.ckpt")
        trainer.strategy.barrier()
        found = torch.load(f"{folder}/{part}.ckpt", weights_only=False)
        saved.append({"metrics": metrics, **{key: found.get(key) for key in KEPT}})
        (tested,) = trainer.test(module, loader(), verbose=False)
        saved[-1]["tested"] = tested["test_loss"]
    return saved


KEPT = ("state_dict", "current_model_state", "averaging_state", "global_step")


@pytest.mark.parametrize(
    "case", [next(iter(CASES)), *(pytest.param(case, marks=pytest.mark.slow) for case in [*CASES][1:])]
)
def test_averages_are_those_of_one_device_wherever_weights_are(case: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "pipeline").mkdir()
    results = World(3).run(run, case, str(tmp_path / "pipeline"), True)
    expected = run(case, str(tmp_path / "plain"), False)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9, check_device=False)


def fit_alone(strategy: Any) -> dict[str, torch.Tensor]:
    trainer, module = make_trainer(strategy, max_epochs=2, callbacks=[average()]), Net()
    trainer.fit(module, loader(), loader())
    return {**module.state_dict(), "loss": trainer.callback_metrics["val_loss"]}


def test_a_single_rank_averages_as_ever() -> None:
    torch.testing.assert_close(fit_alone(dapple(microbatches=2)), fit_alone("auto"), rtol=1e-9, atol=1e-9)


def peek() -> None:
    trainer = make_trainer(dapple(layout="1-1"), max_epochs=1, callbacks=[Peeking()])
    trainer.fit(Net(), loader())


def test_an_average_that_another_rank_keeps_is_not_read_by_mistake() -> None:
    for result in World(2).results(peek):
        assert isinstance(result, Raised), result
    assert any(result.kind == AbsentError.__name__ for result in World(2).results(peek))
