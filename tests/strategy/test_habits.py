"""What people do with modules: slices of parameter lists, metrics as losses, helpers that are no modules."""

from __future__ import annotations

import functools
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from capture.traces import traced_inside
from lightning_pipe.capture import Request, capture_step, flatten
from lightning_pipe.errors import CaptureError
from ranks.world import World
from strategy.fits import ON, Losses, dapple, make_trainer

WIDTH, SAMPLES = 8, 24
ROUNDING = 1e-9
SINGLE = 1e-6  # metrics add up in float32


class Regressor(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))[:, 0]

    def loss(self, prediction, y):
        return F.mse_loss(prediction, y)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class SliceOfAParameterList(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.full((WIDTH,), 1.0 + k)) for k in range(4)])

    def forward(self, x):
        for scale in self.scales[1:3]:
            x = x * scale
        return super().forward(x)


class CopyOfAParameterDict(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(WIDTH)), "b": nn.Parameter(torch.ones(WIDTH))})

    def forward(self, x):
        for scale in self.scales.copy().values():
            x = x * scale
        return super().forward(x)


class SliceOfAModuleList(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for block in self.blocks[:2]:
            x = torch.tanh(block(x))
        return super().forward(x)


class SquaredError(torchmetrics.Metric):
    """A loss that is a metric: sums of errors and counts."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, prediction, y):
        self.total = self.total + (prediction - y).square().sum()
        self.count += y.numel()

    def compute(self):
        return self.total / self.count


class MetricAsLoss(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = SquaredError()

    def loss(self, prediction, y):
        loss = self.criterion(prediction, y)
        self.log("train_loss", self.criterion, on_epoch=True, on_step=False)
        return loss


class MetricInALoss(Regressor):
    """Its value is one term of the loss, and is logged as well."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = torchmetrics.MeanSquaredError()

    def loss(self, prediction, y):
        error = self.criterion(prediction, y)
        self.log("train_loss", error, on_epoch=True, on_step=False)
        return 2 * error + prediction.abs().mean()


class Collector:
    """A metric that is no module: keeps what it is given."""

    def __init__(self) -> None:
        self.errors: list[torch.Tensor] = []

    def update(self, prediction, y):
        self.errors.append((prediction - y).abs().mean().detach())

    def result(self):
        return torch.stack(self.errors).mean()


class CollectsInAHelper(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.collector = Collector()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.collector.update(self(x), y)

    def on_validation_epoch_end(self):
        self.log("val_error", self.collector.result())
        self.collector.errors.clear()


@functools.cache
def slope(width: int, height: int, device: torch.device) -> torch.Tensor:
    return torch.arange(width, dtype=torch.float64, device=device) * height / width


class CachedTensor(Regressor):
    """A tensor that a function keeps: what a trace had made of it was used by the plain step, which failed."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss(self(x + slope(WIDTH, batch_idx % 2, x.device)), y)


CONTAINERS = {cls.__name__: cls for cls in (SliceOfAParameterList, CopyOfAParameterDict, SliceOfAModuleList)}
LOSSES = {cls.__name__: cls for cls in (MetricAsLoss, MetricInALoss)}
MODULES = {**CONTAINERS, **LOSSES, "CollectsInAHelper": CollectsInAHelper, "CachedTensor": CachedTensor}


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    return DataLoader(list(zip(x, x.sum(1), strict=True)), batch_size=8)


def fitted(name: str, options: dict[str, Any] | None) -> tuple[list[float], dict[str, float], dict[str, torch.Tensor]]:
    """Fit on all ranks of this world, or plainly; a worker function."""
    torch.manual_seed(0)
    module, losses = MODULES[name]().double(), Losses()
    trainer = make_trainer(
        "auto" if options is None else dapple(witness=True, **options), max_epochs=2, callbacks=[losses]
    )
    trainer.fit(module, loader(), loader())
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert not [*traced_inside(vars(module))]
    return losses.losses, metrics, {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.sampled
@pytest.mark.parametrize("route", ["joint", "replay"])
@pytest.mark.parametrize("name", [*CONTAINERS, *LOSSES])
def test_habits_train_as_on_one_device(name: str, route: str) -> None:
    losses, metrics, parameters = fitted(name, None)
    rounding = SINGLE if name in LOSSES else ROUNDING
    for found in World(2).run(fitted, name, {"layout": "1-1", "microbatches": 2, "capture": route}):
        assert found[0] == pytest.approx(losses, rel=rounding)
        assert found[1] == pytest.approx(metrics, rel=SINGLE)
        for key, value in parameters.items():
            torch.testing.assert_close(
                found[2][key], value, rtol=rounding, atol=rounding, msg=lambda m, k=key: f"{k}: {m}"
            )


def test_a_helper_that_is_no_module_keeps_no_tensors_of_a_trace() -> None:
    module = CollectsInAHelper()
    structure = flatten((torch.randn(4, WIDTH), torch.randn(4)))[1]
    with pytest.raises(CaptureError, match=r"self\.collector\.errors"):
        capture_step(Request(module, "validation_step", structure, samples=4))
    assert module.collector.errors == []
    assert not [*traced_inside(vars(module))]


def test_what_a_helper_has_collected_is_that_of_one_device() -> None:
    expected = fitted("CollectsInAHelper", None)[1]
    for _, metrics, _ in World(2).run(fitted, "CollectsInAHelper", {"layout": "1-1", "microbatches": 2}):
        assert metrics == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("route", ["auto", "replay"])
def test_caches_of_functions_keep_no_tensors_of_a_trace(route: str) -> None:
    losses, _, _ = fitted("CachedTensor", None)
    found, _, _ = fitted("CachedTensor", {"layout": "1", "microbatches": 2, "capture": route})
    assert found == pytest.approx(losses, rel=ROUNDING)
    assert slope(WIDTH, 1, torch.device(ON)).sum() == WIDTH / 2 - 0.5


class CountsInAHelper(Regressor):
    """Keeps state for its next call in an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.collector = Collector()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.collector.errors.append(loss.detach())
        return loss * len(self.collector.errors)


MODULES["CountsInAHelper"] = CountsInAHelper


def test_a_training_step_that_keeps_state_in_a_helper_trains_as_on_one_device() -> None:
    expected = fitted("CountsInAHelper", None)
    for found in World(2).run(fitted, "CountsInAHelper", {"layout": "1-1"}):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
