"""What a replayed step keeps on its module: results of metrics, classes that it makes, and what nobody can be told."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import Raised, World
from slow import slow_but
from strategy.fits import Losses, dapple, make_trainer

SAMPLES, WIDTH = 8, 4


class Net(pl.LightningModule):
    """Appends what a metric returned to a list, and makes a class that it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.error = torchmetrics.MeanSquaredError()
        self.outputs: list[dict[str, Any]] = []
        self.double()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if not hasattr(self, "kind"):

            class Output:
                scale = 2.0

            self.kind = Output
        out = self.two(torch.tanh(self.one(batch))).squeeze(1) * self.kind.scale
        error = self.error(out.detach(), batch[:, 0].contiguous())
        self.outputs.append({"error": error, "samples": len(batch)})
        return (out - batch[:, 0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Untold(Net):
    """Keeps a function of its own, which the next step calls."""

    rate = staticmethod(lambda: 1.0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.two(self.one(batch)).square().mean() * self.rate()
        rate = self.rate() * 0.5
        self.rate = lambda: rate
        return loss


def fitted(kind: type[Net], options: dict[str, Any] | None) -> tuple[list[float], list[tuple[float, int]]]:
    """Return losses and what the step kept; a worker function."""
    torch.manual_seed(0)
    module, losses = kind(), Losses()
    data = torch.randn(4 * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=1, callbacks=[losses])
    trainer.fit(module, DataLoader(data, batch_size=SAMPLES))
    return losses.losses, [(float(one["error"]), one["samples"]) for one in module.outputs]


OPTIONS = {"layout": "1-1", "microbatches": 2, "capture": "replay", "planner": "uniform", "costs": "counted"}


def test_results_of_metrics_and_classes_are_kept_as_on_one_device() -> None:
    losses, kept = fitted(Net, None)
    for found, said in World(2).run(fitted, Net, OPTIONS):
        assert found == pytest.approx(losses, rel=1e-9)
        assert [n for _, n in said] == [n for _, n in kept]
        assert [error for error, _ in said] == pytest.approx([error for error, _ in kept], rel=1e-6)


def test_what_other_ranks_cannot_be_told_is_refused() -> None:
    for result in World(2).results(fitted, Untold, OPTIONS):
        assert isinstance(result, Raised)
        assert "self.rate" in result.text and "Keep numbers" in result.text


class Layers(pl.LightningModule):
    """Four layers, whose calls hooks count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).double()
        self.calls = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counts(pl.Callback):
    """Count calls of layers: on the module or here, from before or after a plan is made."""

    def __init__(self, layers: slice, *, is_on_module: bool, is_late: bool) -> None:
        self.layers, self.is_on_module, self.is_late, self.calls = layers, is_on_module, is_late, 0

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        if not self.is_late:
            self.watch(module)

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.is_late:
            self.watch(module)

    def watch(self, module: pl.LightningModule) -> None:
        def count(*_: Any) -> None:
            owner.calls += 1

        owner = module if self.is_on_module else self
        for layer in module.layers[self.layers]:
            layer.register_forward_hook(count)


def counted(cases: list[tuple[Any, ...]], options: dict[str, Any] | None) -> list[tuple[int, list[str]]]:
    """Return what each callback has counted, and warnings that name what it counts in; a worker function."""
    found = []
    for layers, is_on_module, is_late in cases:
        torch.manual_seed(0)
        module, counts = Layers(), Counts(slice(*layers), is_on_module=is_on_module, is_late=is_late)
        trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=1, callbacks=[counts])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(torch.randn(4 * SAMPLES, WIDTH, dtype=torch.float64), batch_size=SAMPLES))
        texts = [str(one.message) for one in said if "changed inside of sub-modules" in str(one.message)]
        found.append((module.calls + counts.calls, [text for text in texts if "calls" in text]))
    return found


@pytest.mark.parametrize("capture", slow_but(["auto"], ["auto", "replay"]))
def test_calls_of_sub_modules_are_counted_as_on_one_device_or_the_counter_is_named(capture: str) -> None:
    cases = [
        ((0, 1), True, True),
        ((0, 1), False, False),
        ((3, 4), False, True),
        ((None,), True, False),
        ((None,), False, True),
    ]
    expected = [calls for calls, _ in counted(cases, None)]
    leader, other = World(2).run(counted, cases, {**OPTIONS, "capture": capture})
    for case, calls, one, two in zip(cases, expected, leader, other, strict=True):
        assert one[0] == two[0], case
        assert one[0] == calls or one[1], case
        assert bool(one[1]) == (case[0] == (None,)), case


class Keeps(pl.Callback):
    """Keep the mean and the outputs of the first layer."""

    def __init__(self) -> None:
        self.means: dict[str, float] = {}
        self.outputs: list[torch.Tensor] = []

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        module.layers[0].register_forward_hook(self.keep)

    def keep(self, layer: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.means["last"] = output.mean().item()
        self.outputs.append(output.detach().clone())


def kept_by_hook(options: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    module, keeps = Layers(), Keeps()
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=1, callbacks=[keeps])
    trainer.fit(module, DataLoader(torch.randn(2 * SAMPLES, WIDTH, dtype=torch.float64), batch_size=SAMPLES))
    return [keeps.means["last"], *torch.cat(keeps.outputs).flatten().tolist()]


def test_what_a_hook_of_one_sub_module_keeps_in_a_callback_is_that_of_one_device() -> None:
    expected = kept_by_hook(None)
    for found in World(2).run(kept_by_hook, OPTIONS):
        assert found == pytest.approx(expected, rel=1e-9)
