"""What a step logs, returns or gives to metrics is that of the whole batch; a graph may say that it is not."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import World
from strategy.fits import checked, make_trainer

REPLAYED = {"capture": "replay", "microbatches": 2, "cache": "off"}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 3)
        self.returned: list[list[float]] = []

    def both(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.two(torch.tanh(self.one(batch["x"])))
        return out, F.cross_entropy(out, batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EveryKind(Net):
    def training_step(self, batch, batch_idx):
        out, loss = self.both(batch)
        right = out.argmax(1) == batch["y"]
        self.log("correct", right.sum())
        self.log("correct, as a float", right.sum().to(out), reduce_fx="sum", on_epoch=True)
        self.log("a mean that is summed over batches", 2 * loss.detach(), reduce_fx=torch.sum, on_epoch=True)
        self.log("a mean whose maximum is wanted", 3 * loss.detach(), reduce_fx="max", on_epoch=True)
        self.log_dict({"max": out.max(), "min": out.min(), "step": self.global_step, "mean": out.mean().item()})
        self.log("a count in Python", (batch["y"] >= 1).sum().item())
        return {"loss": loss, "correct": right.sum(), "total": out.detach().sum(), "top": out.detach().amax()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.returned.append([float(outputs[name]) for name in ("correct", "total", "top")])

    def validation_step(self, batch, batch_idx):
        out, loss = self.both(batch)
        self.log_dict({"val_loss": loss, "val_max": out.max()})
        self.log("val_correct", (out.argmax(1) == batch["y"]).sum(), reduce_fx="sum")


class Seen(pl.Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, *_):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(kind: type[Net], options: dict[str, Any] | None) -> tuple[list[dict[str, float]], list[list[float]], list[str]]:
    """Return all metrics after every batch, what hooks got of the outputs, and warnings; a worker function."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        module = kind().double()
        data = [{"x": torch.randn(8, dtype=torch.float64), "y": torch.randint(3, ())} for _ in range(14)]
    seen = Seen()
    strategy = "auto" if options is None else checked(**options)
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[seen], num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, *(DataLoader(data, batch_size=5) for _ in ("train", "validate")))
    seen.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    return seen.metrics, module.returned, [str(one.message) for one in caught]


def test_sums_means_and_extremes_are_those_of_the_whole_batch() -> None:
    """A mean that `reduce_fx="sum"` adds over batches was added over micro-batches too, and a count was averaged."""
    metrics, returned, _ = fit(EveryKind, None)
    for found, outputs, _ in World(2).run(fit, EveryKind, {**REPLAYED, "layout": "1-1"}):
        for one, expected in zip(found, metrics, strict=True):
            assert one == pytest.approx(expected, rel=1e-9)
        for row, expected_row in zip(outputs, returned, strict=True):
            assert row == pytest.approx(expected_row, rel=1e-9)


class Spread(Net):
    def training_step(self, batch, batch_idx):
        out, loss = self.both(batch)
        self.log("spread", out.std())
        self.log("mean", out.mean())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("perplexity", self.both(batch)[1].exp())


def test_what_is_none_of_these_is_made_of_all_samples_in_training_and_evaluation() -> None:
    """A standard deviation of micro-batches makes none of the batch: the head of the step makes it, once."""
    assert_as_one_device(Spread)


def assert_as_one_device(kind: type[Net]) -> None:
    """Compare what is logged and returned with one device, and that nothing is said of micro-batches."""
    metrics, returned, _ = fit(kind, None)
    found, outputs, caught = fit(kind, REPLAYED)
    for one, expected in zip(found, metrics, strict=True):
        assert one == pytest.approx(expected, rel=1e-6)
    assert outputs == [pytest.approx(row, rel=1e-9) for row in returned]
    assert not [text for text in caught if "icro-batches" in text]


class Measured(Net):
    """Metrics that are given numbers, and returned tensors without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.ModuleDict({name: torchmetrics.SumMetric() for name in ("count", "item", "size", "total")})
        self.means = nn.ModuleDict({name: torchmetrics.MeanMetric() for name in ("share", "weighed", "loss")})
        self.largest, self.smallest = torchmetrics.MaxMetric(), torchmetrics.MinMetric()

    def update(self, batch):
        out, loss = self.both(batch)
        right = out.argmax(1) == batch["y"]
        self.sums["count"].update(right.sum())
        self.sums["item"].update(right.sum().item())
        self.sums["size"].update(len(right))
        self.sums["total"].update(value=out.sum())
        self.means["share"].update(right.double().mean())
        self.means["weighed"].update(out.mean(), weight=len(right))
        self.means["loss"].update(loss)
        self.largest.update(out.max())
        self.smallest(out.min())
        classes = F.one_hot(batch["y"], 3)
        confusion = torch.einsum("np,nt->pt", F.one_hot(out.argmax(1), 3).double(), classes.double())
        said = {
            "center": out.mean(0),
            "per class": classes.sum(0),
            "confusion": confusion,
            "tops": out.amax(0),
            "constant": torch.arange(3.0, dtype=torch.float64),
            "any": (out > 10.0).any(),
            "outputs": out,
        }
        return loss, {name: value.detach() for name, value in said.items()}

    def training_step(self, batch, batch_idx):
        loss, said = self.update(batch)
        return {"loss": loss, **said}

    def validation_step(self, batch, batch_idx):
        return self.update(batch)[1]

    def on_train_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.returned.append([float(len(value)) if value.ndim else 0.0 for value in outputs.values()])
        self.returned.append([float(number) for value in outputs.values() for number in value.flatten()])

    on_validation_batch_end = on_train_batch_end

    def on_train_epoch_end(self):
        metrics = {**self.sums, **self.means, "largest": self.largest, "smallest": self.smallest}
        self.log_dict({name: metric.compute() for name, metric in metrics.items()})


@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_what_metrics_are_given_and_hooks_get_is_that_of_the_whole_batch(capture: str) -> None:
    """Counts that a metric was given were averaged, and a mean by class was returned once per micro-batch."""
    metrics, returned, _ = fit(Measured, None)
    found, outputs, caught = fit(Measured, {**REPLAYED, "capture": capture})
    assert found[-1] == pytest.approx(metrics[-1], rel=1e-6)  # torchmetrics computes in single precision
    for row, expected_row in zip(outputs, returned, strict=True):
        assert row == pytest.approx(expected_row, rel=1e-9, abs=1e-12)
    assert not [text for text in caught if "icro-batches" in text]


class MeasuredSpread(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spread = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        out, loss = self.both(batch)
        self.spread.update(out.std())
        return {"loss": loss, "by column": out.std(0)}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.returned.append([float(number) for number in outputs["by column"]])

    def on_train_epoch_end(self):
        self.log("spread", self.spread.compute())


def test_metrics_and_outputs_that_are_none_of_these_are_made_of_all_samples() -> None:
    assert_as_one_device(MeasuredSpread)


class RareClass(Net):
    """The share is zero until the third batch."""

    def training_step(self, batch, batch_idx):
        _, loss = self.both(batch)
        self.log("share", ((batch["x"][:, 0] > 0) & (self.global_step >= 2)).double().mean())
        return loss


def test_a_number_that_is_zero_at_first_is_that_of_the_batch_when_micro_batches_begin_to_differ() -> None:
    assert_as_one_device(RareClass)


class SymbolicSizes(Net):
    """The number of samples enters as a number, which a graph keeps as a symbol."""

    def said(self, batch):
        out, loss = self.both(batch)
        hits, n = out.argmax(1) == batch["y"], len(out)
        return loss, {
            "by size": hits.sum() / n,
            "by tensor": hits.sum() / torch.tensor(n),
            "each by size": (out.pow(2) / n).sum(),
            "root": (out.pow(2).sum() / n).sqrt(),
            "times": out.mean() * n,
            "made of both": out.mean() * torch.tensor(n) - out.sum() / n,
            "reciprocal": torch.full((), 1.0 / n),
            "less one": out.pow(2).sum() / (torch.tensor(n) - 1),
        }

    def training_step(self, batch, batch_idx):
        loss, said = self.said(batch)
        self.log_dict(said)
        return {"loss": loss, **{name: value.detach() for name, value in said.items()}}

    def validation_step(self, batch, batch_idx):
        self.log_dict({f"val {name}": value for name, value in self.said(batch)[1].items()})

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.returned.append([float(value) for value in outputs.values()])


class FixedSizes(SymbolicSizes):
    """It enters as a number of Python's, so that a graph holds for one."""

    def said(self, batch):
        loss, said = super().said(batch)
        out, n = self.both(batch)[0], float(len(batch["y"]))
        fixed = {
            "by float": (out.argmax(1) == batch["y"]).sum() / n,
            "each by float": (out.pow(2) / n).sum(),
            "times float": out.mean() * n,
            "weights": self.two.weight.pow(2).sum() + 0 * n,
        }
        return loss, {**said, **fixed}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kind", [FixedSizes, SymbolicSizes])
@pytest.mark.parametrize("options", [{}, {"layout": "1-1"}, {"layout": "2"}, {"capture": "replay"}], ids=str)
def test_the_number_of_samples_is_that_of_the_batch_or_results_are_named(
    kind: type[SymbolicSizes], options: dict[str, Any]
) -> None:
    """A count divided by `float(len(y))` was that of one micro-batch, added over all: some times an accuracy."""
    metrics, returned, _ = fit(kind, None)
    options = {"capture": "joint", "microbatches": 2, "cache": "off", **options}
    runs = World(2).run(fit, kind, options) if "layout" in options else [fit(kind, options)]
    told = [text for text in runs[0][2] if "icro-batches" in text]
    for found, outputs, _ in runs:
        for one, expected in zip(found, metrics, strict=True):
            assert one.keys() == expected.keys()
            wrong = {name for name in one if one[name] != pytest.approx(expected[name], rel=1e-6)}  # sizes are single
            assert all(any(f"'{name}'" in text for text in told) for name in wrong), (wrong, told)
            assert wrong <= {f"{where}{name}" for where in ("", "val ") for name in NEITHER}
        for row, expected_row in zip(outputs, returned, strict=True):
            assert row == pytest.approx(expected_row, rel=1e-6) or told
    assert not told or kind is FixedSizes or options["capture"] == "replay"


NEITHER = ("root", "made of both", "reciprocal", "less one")  # a sum nor a mean: a symbolic graph makes them once more


class SizedRows(Net):
    def training_step(self, batch, batch_idx):
        out, loss = self.both(batch)
        return {"loss": loss, "share": out / len(out), "fixed share": out / float(len(out)), "plain": out}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.returned.append([float(number) for name in ("share", "plain") for number in outputs[name].flatten()])


def test_rows_that_depend_on_the_number_of_samples_are_those_of_the_batch_in_replay() -> None:
    assert_as_one_device(SizedRows)
