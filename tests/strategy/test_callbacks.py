"""Callbacks, loggers, precision and metrics work in a pipeline as they do on one device."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as cb
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from models.parity import make_loader, make_module
from ranks.world import World
from slow import slow_but
from strategy.fits import Case, Losses, assert_same, dapple, fit, fit_as_pipeline, fitted, make_trainer

TWO = {"layout": "1-1", "microbatches": 2}
NAME = "parameter_groups"


def strategy(options: dict[str, Any] | None) -> Any:
    return "auto" if options is None else dapple(**options)


class Logging(pl.LightningModule):
    """Log in every way that there is: numbers, sums, dicts, metrics, collections, from steps and from hooks."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.head = nn.Linear(4, 8).double(), nn.Linear(8, 7).double()
        self.accuracy = MulticlassAccuracy(7, average="micro")
        self.mean = MeanMetric()
        self.several = MetricCollection([MulticlassAccuracy(7), MulticlassF1Score(7)], prefix="all_")
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.head(torch.relu(self.first(x)))
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("item", loss.item())
        self.log("count", x.shape[0], reduce_fx="sum", on_epoch=True)
        self.log("right", (logits.argmax(1) == y).sum().double(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log_dict({"max": logits.max(), "min": logits.min()}, on_epoch=True, batch_size=len(y))
        self.mean.update(loss.detach())
        self.log("accuracy", self.accuracy(logits, y), on_epoch=True)
        self.log_dict(self.several(logits, y), on_step=True)
        return {"loss": loss, "logits": logits.detach(), "y": y, "n": 3}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["n"] == 3 and outputs["logits"].shape == (len(outputs["y"]), 7)
        self.seen.append(outputs["logits"].sum().item())
        self.log("from_hook", outputs["logits"].abs().mean())

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "loss_epoch"}}


def log_everything(options: dict[str, Any] | None, folder: str) -> tuple[Any, ...]:
    module = Logging()
    logger = CSVLogger(folder, version="")
    trainer = make_trainer(strategy(options), max_epochs=3, logger=logger, log_every_n_steps=1)
    trainer.fit(module, make_loader(NAME, dtype=torch.float64))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    with Path(logger.log_dir, "metrics.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    return metrics, module.seen, rows, trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("layout", ["1-1", "2-1", "1-2"])
def test_everything_that_is_logged_is_the_same_on_all_ranks(layout: str, tmp_path: Path) -> None:
    metrics, seen, table, rate = log_everything(None, str(tmp_path / "plain"))
    assert len(metrics) > 12 and rate < 0.01
    options = {"layout": layout, "microbatches": 3}
    for found in World(sum(map(int, layout.split("-")))).run(log_everything, options, str(tmp_path / "pipeline")):
        assert found[0] == pytest.approx(metrics, rel=1e-5)  # metrics are summed in float32
        assert found[1] == pytest.approx(seen, rel=1e-9)
        assert found[3] == rate
        for one, two in zip(found[2], table, strict=True):
            assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.parametrize(
    "precision", slow_but(("bf16-mixed", "bf16-true"), ("bf16-mixed", "bf16-true", "64-true", "32-true"))
)
def test_precision_is_that_of_one_device(precision: str) -> None:
    case = Case(NAME, {"microbatches": 1}, {"precision": precision}, epochs=1, dtype=torch.float32)
    expected = fit(case)
    case.options["layout"] = "1-1"
    for found in World(2).run(fit_as_pipeline, case):
        assert_same(found, expected, rtol=1e-6 if precision != "64-true" else 1e-9)


def train_with(options: dict[str, Any] | None, callback: str) -> Any:
    made = {
        "early stopping": lambda: cb.EarlyStopping("val_loss", patience=1, min_delta=1.0),
        "accumulation": lambda: cb.GradientAccumulationScheduler({0: 1, 1: 2}),
        "summary": lambda: cb.ModelSummary(max_depth=3),
        "unfreezing": Unfreeze,
        "temperature": Temperature,
        "stop": lambda: cb.LambdaCallback(on_train_epoch_end=lambda trainer, _: setattr(trainer, "should_stop", True)),
    }
    losses, module = Losses(), make_module(NAME, dtype=torch.float64)
    callbacks = [losses, made[callback]()]
    trainer = make_trainer(strategy(options), max_epochs=4, callbacks=callbacks)
    loaders = (make_loader(NAME, seed=s, dtype=torch.float64) for s in (0, 1))
    trainer.fit(module, *loaders)
    return fitted(trainer, module, losses.losses)


class Unfreeze(pl.Callback):
    """Freeze the first layers, and train them from the second epoch on."""

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.body[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            module.body[0].requires_grad_(True)


class Temperature(pl.Callback):
    """Change an attribute that the step reads."""

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        module.temperature = 1.0
        forward = module.forward
        module.forward = lambda batch: forward(batch) / module.temperature

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        module.temperature = 1.0 + trainer.current_epoch


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("callback", ["early stopping", "accumulation", "summary", "unfreezing", "temperature", "stop"])
def test_callbacks_have_the_same_effect(callback: str) -> None:
    expected = train_with(None, callback)
    for found in World(2).run(train_with, TWO, callback):
        assert_same(found, expected, rtol=1e-9)


class Tuned(pl.LightningModule):
    """A backbone and a head, as Lightning's finetuning callback wants them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.backbone = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)).double()
            self.head = nn.Linear(8, 7).double()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.backbone(x)), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def finetune(options: dict[str, Any] | None, path: str, load: str | None = None) -> Any:
    losses, module = Losses(), Tuned()
    callbacks = [losses, cb.BackboneFinetuning(1, verbose=False)]
    trainer = make_trainer(strategy(options), max_epochs=3 if load is None else 4, callbacks=callbacks)
    trainer.fit(module, make_loader(NAME, dtype=torch.float64), ckpt_path=load)
    trainer.save_checkpoint(path)
    return fitted(trainer, module, losses.losses)


def test_a_backbone_can_be_finetuned_and_training_resumed(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("plain", "pipeline", "plain later", "pipeline later")]
    expected = finetune(None, paths[0])
    for found in World(2).run(finetune, TWO, paths[1]):
        assert_same(found, expected, rtol=1e-9)
    one, two = (torch.load(path, weights_only=False) for path in paths[:2])
    assert one["callbacks"] == two["callbacks"]
    torch.testing.assert_close(one["optimizer_states"], two["optimizer_states"], rtol=1e-9, atol=1e-9)
    later = finetune(None, paths[2], paths[0])
    for found in World(2).run(finetune, TWO, paths[3], paths[1]):
        assert_same(found, later, rtol=1e-9)


class Summary(pl.LightningModule):
    """A module with an example input, on which Lightning would run it to summarise it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
        self.example_input_array = torch.ones(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()

    def on_train_start(self) -> None:
        assert self.example_input_array is not None, "once it is summarised"

    def test_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("tested", self(x).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def summarise(options: dict[str, Any] | None) -> float:
    torch.manual_seed(0)
    module, data = Summary(), DataLoader(torch.arange(24.0).reshape(6, 4) / 24, 2)
    trainer = make_trainer(strategy(options), max_epochs=1, enable_model_summary=True)
    trainer.fit(module, data)
    assert module.example_input_array is not None
    return trainer.test(module, data, verbose=False)[0]["tested"]


def test_a_summary_with_an_example_input_and_a_test_after_training() -> None:
    expected = summarise(None)
    assert World(2).run(summarise, TWO) == [pytest.approx(expected, rel=1e-5)] * 2


def trace(folder: str) -> None:
    options = {**TWO, "trace": f"{folder}/new/trace.json", "timeline_steps": 2}
    make_trainer(dapple(**options), max_epochs=1).fit(make_module(NAME), make_loader(NAME))


def test_the_timeline_of_all_ranks_is_written_once(tmp_path: Path) -> None:
    World(2).run(trace, str(tmp_path))
    events = json.loads((tmp_path / "new" / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "F"]
    assert sorted(names) == sorted(["0F0", "0F1", "1F0", "1F1"] * 2)
    assert {event["pid"] for event in events} == {0, 1}
