"""Compatibility with features of Lightning: a row each, equal to one device or refused with this text.

python -m strategy.compatibility    (in tests) writes docs/compatibility.md from the rows that the tests hold.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing.process
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks as cb
from lightning.pytorch import loggers
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader, grad_norm
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from strategy import optimizer_kinds as kinds
from strategy.compat_project import CLASSES, Data, Named, Net, Stream, fit, loader, tensors
from third_party import table
from third_party.modules import SEEN

Run = Callable[..., Any]
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
ROUNDING = 1e-9  # of sums in float64, relative


@dataclass(frozen=True)
class Row:
    """A feature and what is true of it.

    Attributes:
        name: as a user writes it.
        trainer: options of the Trainer; a function of a folder where they need one.
        module: makes the module.
        run: what is run; its result is compared, too.
        refused: text of the error that refuses it; "" where it works.
        by: who refuses, "" for this package.
        tolerance: largest relative difference of every number; None where numbers differ by design, which `note` says.
        note: what else to know.
        needs: package without which the row cannot be tried.
    """

    name: str
    trainer: dict[str, Any] | Callable[[str], dict[str, Any]] = field(default_factory=dict)
    module: Callable[[], pl.LightningModule] = Net
    run: Run = fit
    refused: str = ""
    tolerance: float | None = ROUNDING
    note: str = ""
    needs: str = ""

    def options(self, folder: str) -> dict[str, Any]:
        """Return the options of the trainer for files in a folder."""
        return self.trainer(folder) if callable(self.trainer) else dict(self.trainer)


def using(*callbacks: Callable[[], pl.Callback], **options: Any) -> Callable[[str], dict[str, Any]]:
    """Return options with new callbacks for every trainer."""
    return lambda folder: {"callbacks": [make() for make in callbacks], **options}


def changed(**methods: Any) -> Callable[[], Net]:
    """Return what makes a module with some methods replaced."""
    return type("Changed", (Net,), {"__init__": lambda self: Net.__init__(self), **methods})


def mlflow_logger(folder: str) -> Any:
    """Make a logger, one process after the other: MLflow's client makes the tables of its database, and asks nobody."""
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return loggers.MLFlowLogger(tracking_uri=f"sqlite:///{folder}/runs.db")


def logged(folder: str, kind: type, **options: Any) -> dict[str, Any]:
    return {"logger": kind(folder, **options), "log_every_n_steps": 1}


# --- runs


def then(*names: str) -> Run:
    """Return a run of several methods of the trainer, one after the other."""

    def run(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> Any:
        results = []
        for name in names:
            match name:
                case "fit":
                    trainer.fit(module, loader(), loader())
                case "predict":
                    results.append(torch.cat(trainer.predict(module, loader())))
                case _:
                    (result,) = getattr(trainer, name)(module, loader(), verbose=False)
                    results += [torch.as_tensor(value).double() for value in result.values()]
        return results

    return run


def fit_on(make: Callable[[], Any], **options: Any) -> Run:
    return lambda trainer, module, folder: fit(trainer, module, folder, make(), **options)


def fit_with_workers(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> None:
    multiprocessing.process.current_process()._config["daemon"] = False  # ranks of a test world are, and have children
    fit(trainer, module, folder, loader(num_workers=2))


def save_and_load(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> Any:
    fit(trainer, module, folder)
    trainer.save_checkpoint(f"{folder}/all.ckpt")
    trainer.strategy.barrier()
    loaded = type(module).load_from_checkpoint(f"{folder}/all.ckpt")
    return list(loaded.state_dict().values())


def resume(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> None:
    fit(trainer, module, folder)
    trainer.save_checkpoint(f"{folder}/resume.ckpt")
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(), loader(), ckpt_path=f"{folder}/resume.ckpt")


def weighted(self: Net, batch: Any) -> torch.Tensor:
    """Weigh classes by a tensor of the default dtype, which the precision plug-in sets for the step."""
    return F.cross_entropy(self(batch[0].double()), batch[1], weight=torch.linspace(0.3, 1.1, CLASSES))


def scaled(scale: float) -> dict[str, Any]:
    """Return a plug-in as `precision="16-mixed"` makes it on a GPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)], "max_epochs": 5}


def scales(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> Any:
    fit(trainer, module, folder)
    return {name: torch.tensor(value) for name, value in trainer.precision_plugin.state_dict().items()}


def averages(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> Any:
    """Fit, and return what the checkpoints of the last epoch hold, current weights and averages."""
    trainer.callbacks.append(every := cb.ModelCheckpoint(folder, save_top_k=-1, monitor="val_loss"))
    fit(trainer, module, folder)
    trainer.strategy.barrier()
    saved = torch.load(every.best_model_path, weights_only=False)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.strategy.barrier()
    after = torch.load(f"{folder}/after.ckpt", weights_only=False)
    parts = ("state_dict", "current_model_state", "averaging_state")
    return [{part: dict(found[part]) for part in parts} for found in (saved, after)]


def mixed(averages: Any, current: Any, count: Any) -> None:
    for average, now in zip(averages, current, strict=True):
        average.lerp_(now, float(current[0].mean()))


def fit_twice(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> None:
    fit(trainer, module, folder)
    trainer.fit_loop.max_epochs = 3
    fit(trainer, module, folder)


def predict_with_writer(interval: str) -> Row:
    kept: dict[str, Any] = {}

    class Writer(cb.BasePredictionWriter):
        def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            kept.setdefault("batches", []).append((torch.tensor(batch_indices), prediction))

        def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
            kept["epoch"] = (torch.tensor(batch_indices), torch.cat(predictions))

    def run(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> Any:
        kept.clear()
        trainer.predict(module, loader(), return_predictions=interval == "epoch")
        return dict(kept)

    return Row(f"BasePredictionWriter(write_interval='{interval}')", using(lambda: Writer(interval)), run=run)


class Failing(cb.Callback):
    """An error that all ranks find, as a check of losses does."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 4:
            raise FloatingPointError("the loss is too large")


def failing(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> Any:
    """Fail in training, and return what the checkpoint of the exception holds."""
    with contextlib.suppress(FloatingPointError):
        fit(trainer, module, folder)
    found = [torch.load(file, weights_only=False) for file in Path(folder).glob("*.ckpt")]
    last = max(found, key=lambda checkpoint: checkpoint["global_step"])
    for path, owner in module.named_modules():  # a rank keeps its own part when a run fails, and stand-ins of the rest
        for key in owner._parameters:
            owner._parameters[key] = nn.Parameter(last["state_dict"][f"{path}.{key}".removeprefix(".")])
    return torch.tensor(last["global_step"])


def rates(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> Any:
    fit(trainer, module, folder)
    return torch.tensor([group["lr"] for group in trainer.optimizers[0].param_groups])


def best_files(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> Any:
    fit(trainer, module, folder)
    trainer.strategy.barrier()
    best = trainer.checkpoint_callback
    state = torch.load(best.best_model_path, weights_only=False)["state_dict"]
    return [torch.as_tensor(best.best_model_score).double(), list(state.values())]


# --- modules


def schedule(make: Callable[[Any], Any], **options: Any) -> Callable[[], Net]:
    def configure_optimizers(self: Net) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **options}}

    return changed(configure_optimizers=configure_optimizers)


def optimized_by(make: Callable[[Any], Any]) -> Callable[[], Net]:
    return changed(configure_optimizers=lambda self: make(self))


class Manual(Net):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Metrics(Net):
    """Metrics of torchmetrics in every place."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.mean = MulticlassAccuracy(CLASSES), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.mean.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.mean.compute())
        self.mean.reset()


class Normalised(Net):
    """A BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.append(nn.BatchNorm1d(8).double())


class Average(Net):
    """A buffer that training changes, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("fixed", torch.ones(2, dtype=torch.float64))
        self.head.register_buffer("at_head", torch.zeros(3, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.seen += batch[0].sum()
        return super().training_step(batch, batch_idx)


class ScheduleFree(Net):
    """An optimizer whose weights differ in training and evaluation."""

    def configure_optimizers(self) -> Any:
        return kinds.ScheduleFree(self.parameters())

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.optimizers().eval()


class Tuned(Net):
    """A learning rate that is searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class EveryEpoch(cb.LearningRateFinder):
    """Search for the learning rate anew in every epoch, as Lightning's documentation does."""

    def __init__(self) -> None:
        super().__init__(num_training_steps=15, mode="linear")

    def on_fit_start(self, *args: Any, **kwargs: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.lr_find(trainer, module)


def tuned(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> Any:
    fit(trainer, module, folder)
    finder = next(one for one in trainer.callbacks if isinstance(one, cb.LearningRateFinder)).optimal_lr
    return [torch.tensor(module.lr), torch.tensor(finder.results["loss"]), torch.tensor(finder.results["lr"])]


def tuned_before(trainer: pl.Trainer, module: pl.LightningModule, folder: str) -> Any:
    found = Tuner(trainer).lr_find(module, loader(), num_training=20)
    fit(trainer, module, folder)
    return [torch.tensor(module.lr), torch.tensor(found.results["loss"])]


class Compiled(Net):
    """A child that torch compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = torch.compile(self.backbone, backend="eager")


class CompiledLate(Net):
    """A child that is compiled as Lightning's most used template does it."""

    def setup(self, stage: str) -> None:
        self.backbone = torch.compile(self.backbone, backend="eager")


class CompiledInPlace(Net):
    """A child that is compiled by its method."""

    def __init__(self) -> None:
        super().__init__()
        self.head.compile(backend="eager")


class CompiledLoss(Net):
    """A function that is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = torch.compile(F.cross_entropy, backend="eager")

    def loss(self, batch: Any) -> torch.Tensor:
        return self.criterion(self(batch[0].to(self.head[0].weight.dtype)), batch[1])


class Configured(Net):
    """Layers that are made in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.head = None

    def configure_model(self) -> None:
        if self.head is None:
            with torch.random.fork_rng():
                torch.manual_seed(3)
                self.head = nn.Sequential(nn.Linear(8, CLASSES)).double()


def gather_outputs(self: Net, outputs: Any, batch: Any, batch_idx: int) -> None:
    self.log("gathered", self.all_gather(outputs["loss"]).sum(), on_epoch=True)


def decay_by_hand(self: Net, outputs: Any, batch: Any, batch_idx: int) -> None:
    for parameter in self.parameters():
        parameter.data.mul_(0.99)


def log_sample(self: Net) -> None:
    self.log("sample", self(tensors(2)[0]).sum())


def step_that_gathers(self: Net, batch: Any, batch_idx: int) -> Any:
    return self.all_gather(self.loss(batch), sync_grads=True).sum()


def log_norm(self: Net, optimizer: Any) -> None:
    norm = getattr(self.trainer.strategy, "grad_norm", None)
    self.log("norm", norm() if norm else torch.cat([p.grad.flatten() for p in self.parameters()]).norm())


def log_lightnings_norm(self: Net, optimizer: Any) -> None:
    self.log_dict(grad_norm(self, norm_type=2))


def skipping(self: Net, batch: Any, batch_idx: int) -> int | None:
    return -1 if self.trainer.current_epoch == 1 and batch_idx == 1 else None


def stepping(self: Net, batch: Any, batch_idx: int) -> Any:
    """Run a step whose Python reads a value of the batch, so that it is replayed."""
    x = self.backbone(batch[0])
    return F.cross_entropy(self.head(x if float(batch[0].sum()) > -1e9 else -x), batch[1])


def named_step(self: Net, batch: Any, batch_idx: int) -> Any:
    return self.loss((batch["x"], batch["y"]))


def summed(self: Net, batch: Any, batch_idx: int) -> Any:
    loss = self.loss((torch.cat([batch["a"][0], batch["b"][0]]), torch.cat([batch["a"][1], batch["b"][1]])))
    self.log("loss", loss)
    return loss


def groups(module: Net) -> Any:
    own = [{"params": module.backbone.parameters(), "lr": 0.01}, {"params": module.head.parameters()}]
    return torch.optim.AdamW(own, lr=0.1)


class Adopting(cb.BaseFinetuning):
    """Train the head first."""

    def freeze_before_training(self, module: Net) -> None:
        self.freeze(module.backbone)

    def finetune_function(self, module: Net, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.backbone, optimizer)


def trained_part(module: Net) -> Any:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)


def sampled(make: Callable[[TensorDataset], Any]) -> Run:
    def make_loader() -> DataLoader:
        data = TensorDataset(*tensors())
        return DataLoader(data, 8, sampler=make(data))

    return fit_on(make_loader)


def batch_sampled() -> DataLoader:
    data = TensorDataset(*tensors())
    return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 6, drop_last=False))


AT_EXCEPTION = "If all ranks reach it; otherwise the log says why nothing was saved."
FILES = {"enable_checkpointing": True}
LR = torch.optim.lr_scheduler

ROWS: dict[str, tuple[Row, ...]] = {
    "Options of the Trainer": (
        Row("max_epochs=2"),
        Row("max_steps=5", {"max_steps": 5, "max_epochs": -1}),
        Row("max_time", {"max_time": "00:01:00:00"}),
        Row("min_epochs, min_steps", {"min_epochs": 1, "min_steps": 2}),
        Row("limit_train_batches=2", {"limit_train_batches": 2}),
        Row("limit_train_batches=0.5", {"limit_train_batches": 0.5}),
        Row("limit_val_batches=1", {"limit_val_batches": 1}),
        Row("limit_val_batches=0", {"limit_val_batches": 0}),
        Row("val_check_interval=2", {"val_check_interval": 2}),
        Row("check_val_every_n_epoch=2", {"check_val_every_n_epoch": 2}),
        Row("num_sanity_val_steps=0", {"num_sanity_val_steps": 0}),
        Row("overfit_batches=1", {"overfit_batches": 1}),
        Row("fast_dev_run=True", {"fast_dev_run": True}),
        Row("accumulate_grad_batches=2", {"accumulate_grad_batches": 2}),
        Row("gradient_clip_val=0.1", {"gradient_clip_val": 0.1}),
        Row("gradient_clip_algorithm='value'", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        Row("deterministic=True", {"deterministic": True}),
        Row("benchmark=True", {"benchmark": True}),
        Row("inference_mode=False", {"inference_mode": False}),
        Row("use_distributed_sampler=False", {"use_distributed_sampler": False}),
        Row("reload_dataloaders_every_n_epochs=1", {"reload_dataloaders_every_n_epochs": 1}),
        Row("log_every_n_steps=1", {"log_every_n_steps": 1}),
        Row("detect_anomaly=True", {"detect_anomaly": True}, note="Checks only the plain step before training."),
        Row("barebones=True", lambda _: BAREBONES, note="Nothing is logged, as on one device."),
        Row("profiler='simple'", {"profiler": "simple"}),
        Row("profiler='advanced'", {"profiler": "advanced"}),
        Row("PyTorchProfiler", lambda f: {"profiler": PyTorchProfiler(f, "trace", export_to_chrome=False)}),
        Row("enable_model_summary=True", {"enable_model_summary": True}),
        Row("enable_progress_bar=True", {"enable_progress_bar": True}),
        Row("sync_batchnorm=True without BatchNorm", {"sync_batchnorm": True}),
        Row(
            "sync_batchnorm=True with BatchNorm",
            {"sync_batchnorm": True},
            Normalised,
            refused="sync_batchnorm=True replaces backbone.3 (BatchNorm)",
        ),
        Row("precision='64-true'", {"precision": "64-true"}),
        Row("precision='64-true' and torch.linspace in a step", {"precision": "64-true"}, changed(loss=weighted)),
        Row("precision='32-true'", {"precision": "32-true"}, changed(configure_model=lambda self: self.float()),
            tolerance=1e-5, note="Rounding of float32."),
        Row("precision='bf16-mixed'", {"precision": "bf16-mixed"}, tolerance=5e-2, note="Rounding of bfloat16."),
        Row("precision='16-mixed' on a CPU", {"precision": "16-mixed"}, tolerance=5e-2, note="bf16-mixed there."),
        Row("precision='16-mixed' with a loss scale", lambda _: scaled(2.0**12), run=scales, tolerance=5e-2,
            note="One scale for all stages. Rounding of float16."),
        Row("precision='16-mixed' in a replayed step", lambda _: scaled(2.0**12), changed(training_step=stepping),
            run=scales, tolerance=5e-2, note="Rounding of float16."),
        Row("precision='16-mixed' with gradients that overflow", lambda _: scaled(2.0**22), run=scales, tolerance=5e-2,
            note="All ranks skip the same steps."),
        Row("precision='16-mixed' with a fused optimizer", lambda _: scaled(2.0**12), optimized_by(
            lambda m: torch.optim.Adam(m.parameters(), fused=True)), refused="(fused=True) looks itself"),
        Row("precision='bf16-true'", {"precision": "bf16-true"}, tolerance=1e-1, note="Rounding of bfloat16."),
    ),
    "Callbacks": (
        Row("EarlyStopping", using(lambda: cb.EarlyStopping("val_loss", min_delta=9.0, patience=1), max_epochs=5)),
        Row("ModelCheckpoint(monitor=...)", lambda f: {
            "callbacks": [cb.ModelCheckpoint(f, monitor="val_loss")], **FILES}, run=best_files),
        Row("ModelCheckpoint(every_n_train_steps=2)", lambda f: {"callbacks": [cb.ModelCheckpoint(
            f, every_n_train_steps=2, save_top_k=-1)], **FILES}),
        Row("ModelCheckpoint(save_on_exception=True)", lambda f: {"callbacks": [saving(f), Failing()], **FILES},
            run=failing, note=AT_EXCEPTION),
        Row("OnExceptionCheckpoint", lambda f: {"callbacks": [cb.OnExceptionCheckpoint(f), Failing()], **FILES},
            run=failing, note=AT_EXCEPTION),
        Row("LearningRateMonitor", lambda f: {"callbacks": [cb.LearningRateMonitor()], **logged(f, loggers.CSVLogger)}),
        Row("GradientAccumulationScheduler", using(lambda: cb.GradientAccumulationScheduler({0: 1, 1: 3}))),
        Row("Timer", using(lambda: cb.Timer("00:01:00:00"))),
        Row("TQDMProgressBar", using(cb.TQDMProgressBar, enable_progress_bar=True)),
        Row("RichProgressBar", using(cb.RichProgressBar, enable_progress_bar=True)),
        Row("ModelSummary", using(lambda: cb.ModelSummary(3), enable_model_summary=True)),
        Row("RichModelSummary", using(cb.RichModelSummary, enable_model_summary=True)),
        Row("LambdaCallback", using(lambda: cb.LambdaCallback(
            on_train_epoch_end=lambda trainer, _: setattr(trainer, "should_stop", True)))),
        Row("BackboneFinetuning", using(lambda: cb.BackboneFinetuning(1)), optimized_by(trained_part)),
        Row("BaseFinetuning", using(Adopting), optimized_by(trained_part)),
        predict_with_writer("batch"),
        predict_with_writer("epoch"),
        Row("ThroughputMonitor", lambda f: {"callbacks": [cb.ThroughputMonitor(lambda batch: len(batch[1]))],
            **logged(f, loggers.CSVLogger)}, note="Every batch counts once."),
        Row("DeviceStatsMonitor", lambda f: {"callbacks": [cb.DeviceStatsMonitor(cpu_stats=False)],
            **logged(f, loggers.CSVLogger)}, note="Rank 0 only, where the logger is."),
        Row("StochasticWeightAveraging", using(lambda: cb.StochasticWeightAveraging(1e-2, swa_epoch_start=1),
            max_epochs=4), note="Each rank averages its own parameters."),
        Row("StochasticWeightAveraging with BatchNorm", using(lambda: cb.StochasticWeightAveraging(1e-2)), Normalised,
            refused="takes the statistics of backbone.3 (BatchNorm) anew"),
        Row("WeightAveraging", using(lambda: cb.WeightAveraging()), run=averages,
            note="Each rank averages its own parameters."),
        Row("EMAWeightAveraging", using(lambda: cb.EMAWeightAveraging(decay=0.9)), Average, run=averages,
            note="Each rank averages its own parameters."),
        Row("EMAWeightAveraging, fit(ckpt_path=...)", using(lambda: cb.EMAWeightAveraging(decay=0.9)), run=resume),
        Row("a multi_avg_fn that mixes parameters", using(lambda: cb.WeightAveraging(multi_avg_fn=mixed)),
            refused="sees all parameters at once"),
        Row("BatchSizeFinder", using(cb.BatchSizeFinder), refused="until a device runs out of memory"),
        Row("LearningRateFinder", using(lambda: cb.LearningRateFinder(num_training_steps=20)), Tuned, run=tuned),
        Row("LearningRateFinder in an epoch", using(EveryEpoch), Tuned, run=tuned),
        Row("Tuner.lr_find", module=Tuned, run=tuned_before),
        Row("ModelPruning", using(lambda: cb.ModelPruning("l1_unstructured")),
            refused="compares the weights of the whole module"),
    ),
    "Modules": (
        Row("self.log(sync_dist=True)", module=changed(training_step=lambda self, batch, batch_idx: (
            self.log("loss", loss := self.loss(batch), sync_dist=True), loss)[1])),
        Row("torchmetrics", module=Metrics, tolerance=1e-5, note="Metrics sum in float32."),
        Row("a dictionary as result of the step", module=changed(
            training_step=lambda self, batch, batch_idx: {"loss": self.loss(batch), "n": len(batch[1])})),
        Row("configure_model", module=Configured),
        Row("weights written in a hook", module=changed(on_train_batch_end=decay_by_hand),
            note="All ranks get the whole module for the hook."),
        Row("self(x) in on_validation_epoch_end", module=changed(on_validation_epoch_end=log_sample),
            note="All ranks get the whole module for the hook."),
        Row("self.all_gather in a hook", module=changed(on_train_batch_end=gather_outputs)),
        Row("self.all_gather in a step", module=changed(training_step=step_that_gathers)),
        Row("strategy.grad_norm() in on_before_optimizer_step", module=changed(on_before_optimizer_step=log_norm)),
        Row("grad_norm(self) of Lightning", module=changed(on_before_optimizer_step=log_lightnings_norm)),
        Row("on_train_batch_start returns -1", module=changed(on_train_batch_start=skipping)),
        Row("configure_gradient_clipping", {}, changed(
            configure_gradient_clipping=lambda self, optimizer, gradient_clip_val, gradient_clip_algorithm:
            self.clip_gradients(optimizer, 0.05, "norm"))),
        Row("optimizer_step", module=changed(
            optimizer_step=lambda self, epoch, batch_idx, optimizer, closure: optimizer.step(closure=closure))),
        Row("parameter groups", module=optimized_by(groups)),
        Row("Adam with a frozen part", module=optimized_by(
            lambda m: torch.optim.Adam(m.head.parameters(), lr=0.01))),
        Row("OneCycleLR per step", module=schedule(lambda o: LR.OneCycleLR(o, 0.3, total_steps=6), interval="step"),
            run=rates),
        Row("CosineAnnealingLR", module=schedule(lambda o: LR.CosineAnnealingLR(o, 4)), run=rates),
        Row("ReduceLROnPlateau", module=schedule(lambda o: LR.ReduceLROnPlateau(o, patience=0, threshold=9.0),
            monitor="val_loss"), run=rates),
        Row("manual optimization", module=Manual, refused="uses manual optimization"),
        Row("several optimizers", module=optimized_by(lambda m: [torch.optim.SGD(part.parameters(), 0.1) for part in (
            m.backbone, m.head)]), refused="returned several optimizers; expected one"),
        Row("Muon and AdamW in one optimizer", module=optimized_by(lambda m: kinds.Chained(
            torch.optim.Muon([m.head[0].weight]), torch.optim.AdamW([m.head[0].bias, *m.backbone.parameters()]))),
            run=resume),
        Row("schedule-free optimizer", module=ScheduleFree, run=resume),
        Row("SAM", module=optimized_by(lambda m: kinds.Sam(torch.optim.SGD(m.parameters(), 0.1))),
            refused="runs its closure 2 times in a step"),
        Row("LBFGS", module=optimized_by(lambda m: torch.optim.LBFGS(m.parameters())), refused="LBFGS evaluates"),
        Row("torch.compile of a child", module=Compiled, note="Ignored, because the step is captured anyway."),
        Row("torch.compile of a child in setup", module=CompiledLate, note="Ignored."),
        Row("compile() of a child", module=CompiledInPlace, note="Ignored."),
        Row("torch.compile of a function", module=CompiledLoss, note="Ignored."),
        Row("backward", module=changed(backward=lambda self, loss: loss.backward()), refused="overrides backward"),
    ),
    "Data": (
        Row("LightningDataModule with batch hooks", run=fit_on(Data)),
        Row("IterableDataset without a length, ragged", run=fit_on(lambda: DataLoader(Stream(), 6))),
        Row("shuffle=True", run=lambda t, m, f: (torch.manual_seed(3), fit(t, m, f, loader(shuffle=True)))[1]),
        Row("num_workers=2", run=fit_with_workers),
        Row("a smaller last batch", run=fit_on(lambda: loader(7))),
        Row("drop_last=True", run=fit_on(lambda: loader(7, drop_last=True))),
        Row("batch_sampler", run=fit_on(batch_sampled)),
        Row("WeightedRandomSampler", run=sampled(lambda data: WeightedRandomSampler(
            torch.ones(24), 24, generator=torch.Generator().manual_seed(2)))),
        Row("DistributedSampler made by hand", run=sampled(lambda data: DistributedSampler(data, 1, 0, shuffle=False))),
        Row("batches as dictionaries", module=changed(training_step=named_step),
            run=fit_on(lambda: DataLoader(Named(), 8))),
        Row("a dictionary of loaders", module=changed(training_step=summed),
            run=fit_on(lambda: {"a": loader(8), "b": loader(8, shuffle=False)})),
        Row("CombinedLoader('min_size')", module=changed(training_step=summed),
            run=fit_on(lambda: CombinedLoader({"a": loader(6), "b": loader(6, drop_last=True)}, "min_size"))),
        Row("loaders whose batches have different sizes", module=changed(training_step=summed),
            run=fit_on(lambda: {"a": loader(4), "b": loader(8)}), note="Batches stay whole."),
        Row("several validation loaders", run=lambda t, m, f: fit(t, m, f, validation=[loader(4), loader(8)])),
        Row("dataloader_iter in a step", module=changed(training_step=lambda self, dataloader_iter: None),
            refused="takes `dataloader_iter`"),
    ),
    "Runs": (
        Row("trainer.validate", run=then("validate")),
        Row("trainer.test", run=then("test")),
        Row("trainer.predict", run=then("predict")),
        Row("validate, fit, test, predict", run=then("validate", "fit", "test", "predict")),
        Row("trainer.save_checkpoint on all ranks", run=save_and_load),
        Row("fit(ckpt_path=...)", run=resume),
        Row("fit twice", run=fit_twice),
    ),
    "Loggers": (
        Row("CSVLogger", lambda f: logged(f, loggers.CSVLogger)),
        Row("TensorBoardLogger", lambda f: logged(f, loggers.TensorBoardLogger), needs="tensorboard"),
        Row("MLFlowLogger", lambda f: {"logger": mlflow_logger(f), "log_every_n_steps": 1}, needs="mlflow"),
        Row("WandbLogger(offline=True)", lambda f: {"logger": loggers.WandbLogger(save_dir=f, offline=True),
            "log_every_n_steps": 1}, needs="wandb"),
    ),
}  # fmt: skip
BAREBONES = {"barebones": True, "logger": None, "enable_checkpointing": None, "enable_progress_bar": None,
             "enable_model_summary": None}  # fmt: skip


def saving(folder: str) -> cb.ModelCheckpoint:
    callback = cb.ModelCheckpoint(folder)
    callback.save_on_exception = True  # newer than the oldest Lightning that is supported
    return callback


def row_of(name: str) -> Row:
    return next(row for rows in ROWS.values() for row in rows if row.name == name)


def page() -> str:
    """Return docs/compatibility.md as the rows have it."""
    count = sum(map(len, ROWS.values()))
    lines = [
        "# What works, and what is refused",
        "",
        f"Each of these {count} rows is a test (`tests/strategy/test_compatibility.py`, which writes this page). The",
        "test uses the feature on one device and on two ranks, with two stages and two micro-batches.",
        "",
        "- *Equal*: weights, logged values, steps, predictions and files differ by no more than the relative",
        "  tolerance, on every rank.",
        "- *Refused*: the run ends before training, on every rank, with an error that contains this text.",
    ]
    for group, rows in ROWS.items():
        lines += ["", f"## {group}", "", "| feature | result | remark |", "|---|---|---|"]
        for row in rows:
            verdict = (
                "refused"
                if row.refused
                else f"equal,\N{NO-BREAK SPACE}{row.tolerance:g}".replace("e-", "e\N{NON-BREAKING HYPHEN}")
            )
            remark = f"“{row.refused}”" if row.refused else row.note
            lines.append(f"| `{row.name}` | {verdict} | {remark} |" if re.search(r"[=(_.A-Z]", row.name)
                         else f"| {row.name} | {verdict} | {remark} |")  # fmt: skip
    return "\n".join([*lines, *_projects()]) + "\n"


def _projects() -> list[str]:
    """Return the part of the page about other projects, which `tests/third_party` trains."""
    lines = [
        "",
        "## Projects by their own entry points",
        "",
        "`make projects` trains each of these PyPI projects by its own fit function, command or configuration, in an",
        "environment of its own (`make projects NAME=darts` trains one of them). Only the strategy differs between",
        "runs. Losses of at least ten steps, logged values, weights, and what the project's own predict or reload",
        "then returns are compared with one device: *equal* is a largest relative difference below 1e-6 in float64,",
        "1e-4 in float32. The last column has the seconds from `fit` to the end of the first step: on one device, by",
        f"default, with the layout. Two CPU ranks, {table.SEEN_ON}.",
        "",
        "chemprop's command has no option for the strategy; Lightning's own variable `PL_TRAINER_STRATEGY=dapple` has.",
        "finetuning-scheduler wants `allow_untested=True` for strategies that it does not know.",
        "",
        '| project | entry point | default options | `layout="1-1"` | first step |',
        "|---|---|---|---|---|",
        *(f"| {' | '.join(_entry(project))} |" for project in table.PROJECTS.values()),
        "",
        "## Modules of projects",
        "",
        "Each of these PyPI projects has a module, its own or one written around its model, that trains 20 steps on",
        "two stages as on one device (`tests/third_party`, with the extra `projects`). The last column is the largest",
        "relative difference of a weight or logged value (2026-11-22, a 2-core CPU, torch 2.13, Lightning 2.6.6).",
        "",
        "| project | field | largest difference |",
        "|---|---|---|",
    ]
    return lines + [f"| {' | '.join(seen)} |" for seen in SEEN.values()]


def _entry(project: table.Project) -> tuple[str, ...]:
    seconds = (project.first_step_s, *(seen.first_step_s for seen in project.seen.values()))
    times = ", ".join("–" if value is None else f"{value:g}" for value in seconds)  # noqa: RUF001
    return project.release, project.entry, *map(str, project.seen.values()), times


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
