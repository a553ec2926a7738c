"""What a step returns is what it returns on one device, however the batch is cut, or it is named."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.errors import PlanError
from ranks.world import World
from strategy.fits import checked, make_trainer
from strategy.results import CLASSES, FIXED, NUMBERS, TENSORS, Result, each

KINDS: dict[str, dict[str, Result]] = {"numbers": NUMBERS, "tensors": TENSORS, "fixed": FIXED}
SAMPLES, WIDTH = 9, 8
# results for which nothing is computed, so that a step has nothing to plan
NOTHING = (
    *("numbers", "size", "reciprocal", "root of the size", "epoch"),
    *("constant", "nothing", "text", "as many ones", "their numbers", "sizes"),
)


class Module(pl.LightningModule):
    def __init__(self, kind: str, only: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
        self.kind, self.only, self.seen = kind, only, []

    def said(self, batch) -> tuple[torch.Tensor, dict[str, Any]]:
        x, y = batch
        o = self.layers(x)
        made = {name: made for name, made in KINDS[self.kind].items() if self.only in ("", name)}
        values = {name: made(self, o, y) for name, made in made.items()}
        return each(o, y).mean(), {
            name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()
        }

    def training_step(self, batch, batch_idx):
        loss, said = self.said(batch)
        return {"loss": loss, **said}

    def validation_step(self, batch, batch_idx):
        return self.said(batch)[1]

    def predict_step(self, batch, batch_idx):
        return self.said(batch)[1]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append({name: value for name, value in outputs.items() if name != "loss"})

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.seen.append(outputs)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2 * SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (2 * SAMPLES,), generator=generator)
    return DataLoader(list(zip(x, y, strict=True)), batch_size=SAMPLES)


def seen_and_told(kind: str, options: dict[str, Any] | None, only: str = "") -> tuple[list[dict[str, Any]], list[str]]:
    """Fit, validate and predict; return all that was returned, and what was said of micro-batches."""
    data = loader()
    torch.manual_seed(0)
    module = Module(kind, only).double()
    trainer = make_trainer(
        "auto" if options is None else checked(cache="off", **options), max_epochs=1, num_sanity_val_steps=0
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data, data)
        predicted = [] if only in NOTHING else trainer.predict(module, data)
    return [*module.seen, *(predicted or [])], [str(w.message) for w in caught if "icro-batches" in str(w.message)]


@functools.cache
def plain(kind: str) -> list[dict[str, Any]]:
    return seen_and_told(kind, None)[0]


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(
            one.double().cpu(), other.double().cpu(), rtol=1e-6, atol=1e-9
        )
    return one == pytest.approx(other, rel=1e-9) if isinstance(one, float) else one == other


def assert_same_or_named(found: tuple[list[dict[str, Any]], list[str]], expected: list[dict[str, Any]]) -> None:
    seen, told = found
    assert len(seen) == len(expected)
    for one, other in zip(seen, expected, strict=True):
        assert one.keys() == other.keys()
        wrong = {name: (one[name], other[name]) for name in one if not is_same(one[name], other[name])}
        silent = {name: both for name, both in wrong.items() if not any(f"{name!r}" in text for text in told)}
        assert not silent


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("microbatches", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capture", ["joint", "replay"])
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_one_device_or_named(kind: str, capture: str, microbatches: int) -> None:
    found = seen_and_told(kind, {"capture": capture, "microbatches": microbatches})
    assert_same_or_named(found, plain(kind))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("layout", ["1-1", "2"])
@pytest.mark.parametrize("kind", KINDS)
def test_so_they_are_on_all_ranks(kind: str, layout: str) -> None:
    found = World(2).run(seen_and_told, kind, {"layout": layout, "microbatches": 2})
    told = found[0][1]
    for seen, _ in found:
        assert_same_or_named((seen, told), plain(kind))


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["joint", "replay"])
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, own in KINDS.items() for name in own])
def test_so_are_results_of_one_kind_alone(kind: str, name: str, capture: str) -> None:
    found = seen_and_told(kind, {"capture": capture, "microbatches": 4}, name)
    assert_same_or_named(found, [{name: one[name]} for one in plain(kind)][: len(found[0])])


def test_a_step_that_computes_nothing_has_no_plan_of_its_own() -> None:
    """The planners met a graph without operations; in a fit it runs by the plan of the training step."""
    with pytest.raises(PlanError, match="predict_step computes nothing of its batch"):
        make_trainer(checked()).predict(Module("numbers", "epoch"), loader())
