"""Evaluation steps may keep what hooks read, and have batches of any size."""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import World
from strategy.fits import dapple, make_trainer

WIDTH, CLASSES = 8, 5


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.kept: Any = None

    def forward(self, x):
        return self.head(self.blocks(x))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class KeepsAPicture(Plain):
    """Keeps some of the first batch as NumPy, before the modules are called."""

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.kept = batch[0][:3].cpu().numpy()
        super().validation_step(batch, batch_idx)


class KeepsATensor(Plain):
    """Keeps what the head returned for the whole first batch."""

    def validation_step(self, batch, batch_idx):
        logits = self(batch[0])
        if batch_idx == 0:
            self.kept = logits
        self.log("val_loss", F.cross_entropy(logits, batch[1]))


class Encoder(Plain):
    """Layers of torch that have a kernel for evaluation, for who holds all of their weights."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def validation_step(self, batch, batch_idx):
        logits = self.head(self.blocks(batch[0][:, None])[:, 0])
        if batch_idx == 0:
            self.kept = logits
        self.log("val_loss", F.cross_entropy(logits, batch[1]))


MODULES = {cls.__name__: cls for cls in (Plain, KeepsAPicture, KeepsATensor, Encoder)}


def loader(samples: int = 20, batch_size: int = 8) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (samples,), generator=generator)
    return DataLoader(list(zip(x, y, strict=True)), batch_size=batch_size)


def kept(name: str, run: str, options: dict[str, Any] | None) -> tuple[np.ndarray, float]:
    """Fit or validate on all ranks of this world, or plainly; return what the step has kept; a worker function."""
    torch.manual_seed(0)
    module = MODULES[name]().double()
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=1)
    if run == "fit":
        trainer.fit(module, loader(), loader())
    else:
        trainer.validate(module, loader(), verbose=False)
    return np.array([torch.as_tensor(one).cpu() for one in module.kept]), float(trainer.callback_metrics["val_loss"])


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("run", ["fit", "validate"])
@pytest.mark.parametrize("name", ["KeepsAPicture", "KeepsATensor"])
def test_what_an_evaluation_step_keeps_is_that_of_the_whole_batch_on_every_rank(
    name: str, run: str, ranks: int
) -> None:
    expected = kept(name, run, None)
    options = {"layout": "-".join("1" * ranks), "microbatches": 2}
    for found, loss in World(ranks).run(kept, name, run, options):
        np.testing.assert_allclose(found, expected[0], rtol=1e-9)
        assert loss == pytest.approx(expected[1], rel=1e-9)


@pytest.mark.parametrize("layout", ["1-1", "2-1"])
def test_encoder_layers_are_evaluated_wherever_their_weights_are(layout: str) -> None:
    """A rank with all weights of a layer gave them to one kernel, and others called its sub-modules."""
    expected = kept("Encoder", "validate", None)
    options = {"layout": layout, "microbatches": 2, "capture": "replay"}
    for found, loss in World(2 + (layout == "2-1")).run(kept, "Encoder", "validate", options):
        np.testing.assert_allclose(found, expected[0], rtol=1e-9)
        assert loss == pytest.approx(expected[1], rel=1e-9)


def evaluated(method: str, samples: int, batch_size: int, options: dict[str, Any] | None) -> float:
    """Test on all ranks of this world, or plainly; a worker function."""
    torch.manual_seed(0)
    module = Plain().double()
    trainer = make_trainer("auto" if options is None else dapple(**options))
    getattr(trainer, method)(module, loader(samples, batch_size), verbose=False)
    return float(trainer.callback_metrics["test_loss" if method == "test" else "val_loss"])


@pytest.mark.parametrize("route", ["joint", "replay"])
@pytest.mark.parametrize(("method", "samples", "batch_size"), [("test", 2, 8), ("validate", 1, 8), ("test", 5, 3)])
def test_a_first_batch_with_fewer_samples_than_micro_batches_is_evaluated(
    method: str, samples: int, batch_size: int, route: str
) -> None:
    expected = evaluated(method, samples, batch_size, None)
    options = {"layout": "1-1", "microbatches": 4, "capture": route}
    for found in World(2).run(evaluated, method, samples, batch_size, options):
        assert found == pytest.approx(expected, rel=1e-6)


class Narrow(Plain):
    """Writes and reads a buffer around nearly everything."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch, batch_idx):
        loss = self.blocks(batch[0] * self.scale).mean()
        self.scale.mul_(1 + loss.detach())
        return loss


def fit_narrow() -> None:
    """Fit with fewer places to cut than operations suggest; a worker function."""
    module = Narrow().double()
    make_trainer(dapple(layout="1-1", microbatches=2), max_epochs=1).fit(module, loader())


def test_too_few_places_to_cut_are_counted_and_the_others_explained() -> None:
    said = r"can be cut at \d+ places? between them, too few for 2 stages; .* none since .*test_evaluation\.py:\d+"
    with pytest.raises(Exception, match=said):
        World(2).run(fit_narrow)


class OneModule(Plain):
    """Calls a single module when it is tested."""

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.head(batch[0]).square().mean())


def fit_and_test(options: dict[str, Any] | None) -> tuple[float, str]:
    """Fit, then test, on all ranks of this world, or plainly; a worker function. Return the loss, and all warnings."""
    torch.manual_seed(0)
    module = OneModule().double()
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader())
        (metrics,) = trainer.test(module, loader(), verbose=False)
    return float(metrics["test_loss"]), " ".join(str(warning.message) for warning in caught)


def test_an_evaluation_that_has_no_place_to_cut_runs_by_another_plan() -> None:
    expected, _ = fit_and_test(None)
    told = World(2).run(fit_and_test, {"layout": "1-1", "microbatches": 2, "capture": "replay"})
    assert [loss for loss, _ in told] == pytest.approx([expected] * 2, rel=1e-9)
    assert re.search("test_step runs by another plan than .* with layout=1-1 makes.* 0 places", told[0][1])


class Generates(pl.LightningModule):
    """A loop that a tensor ends, as generation of text has one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        left, x, done = torch.full((len(batch),), 3), batch, False
        while not done:
            x, left = torch.tanh(self.layer(x)), left - 1
            done = left.max() == 0
        self.log("mean", x.mean())


def test_a_loop_that_a_tensor_ends_is_run_as_on_one_device() -> None:
    torch.manual_seed(0)
    module, loader = Generates(), DataLoader(torch.ones(4, 4), batch_size=4)
    (expected,) = make_trainer("auto").validate(module, loader)
    (found,) = make_trainer(dapple(layout="1")).validate(module, loader)
    assert found == pytest.approx(expected)


class Searches(Plain):
    """Calls its modules as often as values say, and logs, counts and remembers what it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.mean = list[int](), torchmetrics.MeanMetric()

    def validation_step(self, batch, batch_idx):
        steps = []
        for sample in batch[0]:
            hidden, count = sample, 0
            while count < 5 and int(self(hidden).argmax()) != 2:
                hidden, count = self.blocks(hidden) + 1, count + 1
            steps.append(count)
        self.found += steps
        self.mean.update(torch.tensor(steps).double())
        self.log("mean", self.mean)
        self.log("largest", float(max(steps)), reduce_fx="max")
        return {"all": torch.tensor(steps)}


def searched(options: dict[str, Any] | None) -> tuple[list[int], dict[str, float], list[float]]:
    """Fit, and return what evaluation has found; a worker function."""
    torch.manual_seed(0)
    module = Searches().double()
    module.on_validation_batch_end = lambda outputs, *_: module.found.append(int(outputs["all"].sum()))
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=2)
    trainer.fit(module, loader(12, 4), loader(6, 4))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return module.found, metrics, [float(p.sum()) for p in module.parameters()]


@pytest.mark.parametrize("layout", ["1-1", "2"])
def test_an_evaluation_step_that_no_route_can_hold_runs_as_on_one_device(layout: str) -> None:
    """It ended the training after the first epoch."""
    found, metrics, sums = searched(None)
    assert len(set(found)) > 2, "otherwise the calls do not depend on values"
    for result in World(2).run(searched, {"layout": layout}):
        assert result[0] == found
        assert result[1] == pytest.approx(metrics, rel=1e-9)
        assert result[2] == pytest.approx(sums, rel=1e-9)


_CALLS: list[int] = []


@torch.library.custom_op("lightning_pipe_test::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    _CALLS.append(len(x))
    return x * 2


@counted.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class CallsUnknown(pl.LightningModule):
    """Layers with operators between them of which nothing is known."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).double()

    def predict_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = counted(torch.tanh(layer(x)))
        return x


def predicted(options: dict[str, Any] | None) -> tuple[list[torch.Tensor], int]:
    """Return predictions, and how often this rank has run the operator; a worker function."""
    torch.manual_seed(0)
    module = CallsUnknown()
    _CALLS.clear()
    trainer = make_trainer("auto" if options is None else dapple(**options))
    return trainer.predict(module, loader(12, 4)), len(_CALLS)


def test_layers_behind_an_operator_without_a_rule_run_on_their_own_stages() -> None:
    """Every rank ran the whole model for the whole batch."""
    expected, calls = predicted(None)
    results = World(2).run(predicted, {"layout": "1-1", "microbatches": 2})
    for predictions, _ in results:
        torch.testing.assert_close(predictions, expected)
    assert sum(count for _, count in results) == calls
