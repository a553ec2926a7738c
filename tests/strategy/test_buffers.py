"""What a step keeps in buffers is what it keeps on one device, however the batch is cut, or it is named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from strategy.fits import checked, make_trainer
from strategy.results import CLASSES, FIXED, NUMBERS, TENSORS, Result, each

SAMPLES, WIDTH = 9, 8
WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "set": lambda buffer, value: buffer.copy_(value),
    "added": lambda buffer, value: buffer.add_(value),
    "averaged": lambda buffer, value: buffer.mul_(0.9).add_(0.1 * value),
    "largest": lambda buffer, value: buffer.copy_(torch.maximum(buffer, value)),
}


def shape_of(result: Result) -> tuple[int, ...] | None:
    """Return the shape of a result; None if it is no tensor, or has samples."""
    module: Any = nn.Module()
    module.layers, module.current_epoch = layers(), 0
    shapes = []
    for samples in (4, 6):
        value = result(module, torch.randn(samples, CLASSES, dtype=torch.float64), torch.arange(samples) % CLASSES)
        shapes.append(tuple(value.shape) if isinstance(value, torch.Tensor) else None)
    return shapes[0] if shapes[0] == shapes[1] else None


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES)).double()


Kept = dict[str, tuple[Result, tuple[int, ...]]]  # what a buffer is made of, and its shape
KINDS: dict[str, Kept] = {
    kind: {f"buffer{k}": (made, shape) for k, made in enumerate(own.values()) if (shape := shape_of(made)) is not None}
    for kind, own in {"symbolic": {**NUMBERS, **TENSORS}, "fixed": FIXED}.items()
}


class Keeping(pl.LightningModule):
    def __init__(self, kept: Kept, way: str) -> None:
        super().__init__()
        self.layers, self.kept, self.way = layers(), (kept,), way
        for name, (_, shape) in kept.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        x, y = batch
        o = self.layers(x)
        with torch.no_grad():
            for name, (made, _) in self.kept[0].items():
                WAYS[self.way](self.get_buffer(name), made(self, o, y).to(self.get_buffer(name)))
        return each(o, y).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(strategy: Any, kept: Kept, way: str) -> tuple[dict[str, torch.Tensor], str]:
    """Return all buffers after two batches, and what was said of micro-batches."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2 * SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (2 * SAMPLES,), generator=generator)
    torch.manual_seed(0)
    module, trainer = Keeping(kept, way), make_trainer(strategy, max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(list(zip(x, y, strict=True)), batch_size=SAMPLES))
    return {n: b.clone() for n, b in module.named_buffers()}, " ".join(str(w.message) for w in caught)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_those_of_one_device_or_named(kind: str, way: str) -> None:
    found, told = fit(checked(capture="joint", microbatches=3, cache="off"), KINDS[kind], way)
    for name, expected in fit("auto", KINDS[kind], way)[0].items():
        if not torch.allclose(found[name], expected, rtol=1e-6, atol=1e-9):
            assert f"{name} " in f"{told} " or f"{name}," in told, (name, found[name], expected)


@pytest.mark.parametrize(
    ("way", "name"), [("added", "hits"), ("averaged", "mean"), ("largest", "largest"), ("added", "sum")]
)
def test_sums_means_and_extremes_need_no_word(way: str, name: str) -> None:
    kept: Kept = {"one": (NUMBERS[name], ())}
    found, told = fit(checked(capture="joint", microbatches=3, cache="off"), kept, way)
    torch.testing.assert_close(found, fit("auto", kept, way)[0], rtol=1e-9, atol=1e-12)
    assert "micro-batch" not in told
