"""Gradients that a step takes itself, of a mean by its inputs, are those of the batch, however it is cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from strategy.fits import dapple, make_trainer
from strategy.small import Small, assert_as_on_one_device, loader, run

LAYOUTS = [
    ("few", {"layout": "1-1", "microbatches": 3}),
    pytest.param("all", {"layout": "1-1", "microbatches": 3}, marks=pytest.mark.slow),
    pytest.param("all", {"layout": "2", "microbatches": 2}, marks=pytest.mark.slow),
    pytest.param("all", {"layout": "2"}, marks=pytest.mark.slow),
]

Mean = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MEANS: dict[str, Mean] = {
    "cross entropy": F.cross_entropy,
    "of valid targets": lambda o, y: F.cross_entropy(o, y, ignore_index=1),
    "weighed": lambda o, y: F.cross_entropy(o, y, weight=torch.tensor([0.2, 1.0, 3.0]).double(), label_smoothing=0.1),
    "of pixels": lambda o, y: F.cross_entropy(o[:, :, None, None].repeat(1, 1, 2, 2), y[:, None, None].repeat(1, 2, 2)),
    "squared error": lambda o, y: F.mse_loss(o[:, 0], y.double()),
    "absolute error": lambda o, y: F.l1_loss(o[:, 0], y.double()),
    "huber": lambda o, y: F.huber_loss(o[:, 0], y.double()),
    "smooth": lambda o, y: F.smooth_l1_loss(o, F.one_hot(y, 3).double()),
    "binary": lambda o, y: F.binary_cross_entropy(o[:, 0].sigmoid(), (y > 0).double()),
    "binary of logits": lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], (y > 0).double()),
    "divergence": lambda o, y: F.kl_div(o.log_softmax(1), F.one_hot(y, 3).double(), reduction="batchmean"),
    "margin": lambda o, y: F.multi_margin_loss(o, y),
    "mean": lambda o, y: (o.gather(1, y[:, None]) ** 2).mean(),
    "mean of sums": lambda o, y: o.square().sum(1).mean(0),
    "divided": lambda o, y: o.square().sum() / len(o),
    "multiplied": lambda o, y: (o.square() * (1 / len(o))).sum(),
    "sum": lambda o, y: F.cross_entropy(o, y, reduction="sum"),
    "of the first": lambda o, y: o[0, 1],
    "of the last": lambda o, y: o[-1].sum(),
    "by place": lambda o, y: (o[:, 0] * (torch.arange(len(o)) / len(o))).sum(),
    "spread": lambda o, y: (o - o.mean()).abs().mean(),
    "area": lambda o, y: torch.trapezoid(o[:, 0]),
    "times the number": lambda o, y: F.cross_entropy(o, y) * len(o),
}


def gradient(module: Small, batch: Any, mean: str) -> torch.Tensor:
    x = batch[0].clone().requires_grad_()
    return torch.autograd.grad(MEANS[mean](module(x), batch[1]), x)[0]


class Saliency(Small):
    """Say gradients with respect to inputs, in training as well as in validation."""

    validation = staticmethod(lambda: loader(10, 4, seed=2))
    means: tuple[str, ...] = tuple(MEANS)

    def training_step(self, batch, batch_idx):
        for mean in self.means:
            g = gradient(self, batch, mean).detach()
            self.log(f"{mean}: norm", g.norm(dim=1).mean())
            self.log(f"{mean}: sum", g.abs().sum())
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            found = {mean: gradient(self, batch, mean) for mean in self.means}
        for mean, g in found.items():
            self.log(f"{mean}: largest", g.abs().amax(1).mean())
        _, pulled = torch.func.vjp(lambda x: F.cross_entropy(self(x), batch[1]), batch[0])
        found["pulled back"] = pulled(torch.ones((), dtype=batch[0].dtype))[0]
        found["divided again"] = found["times the number"] / len(batch[0])
        attacked = self(batch[0] + 3 * found["cross entropy"].detach())
        self.log("attacked", F.cross_entropy(attacked, batch[1]))
        return {mean: g.detach() for mean, g in found.items()}

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.noted.append({mean: g.clone() for mean, g in outputs.items()})


class Few(Saliency):
    means = tuple(dict.fromkeys(["cross entropy", "times the number", "spread", *[*MEANS][2::4]]))


def saliency(means: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit; a worker function."""
    return run(Few if means == "few" else Saliency, options, inference_mode=False)


@pytest.mark.parametrize(("means", "options"), LAYOUTS, ids=str)
def test_rows_of_gradients_are_those_of_the_batch(means, options):
    assert_as_on_one_device(saliency, means, options)


class Apart(Saliency):
    def __init__(self, means: tuple[str, ...]) -> None:
        super().__init__()
        self.means = tuple(mean for mean in means if mean != "spread")  # in which samples meet


@pytest.mark.parametrize("means", [Few.means, pytest.param(Saliency.means, marks=pytest.mark.slow)])
def test_they_are_not_taken_for_what_micro_batches_change(means):
    trainer = make_trainer(dapple(layout="1", microbatches=2), max_epochs=1, inference_mode=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Apart(means), loader(), loader(10, 4, seed=2))
    assert not [str(one.message) for one in caught if "micro-batches" in str(one.message)]


class Penalised(Small):
    """Train by gradients of a mean, which flow back."""

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        mean = self.loss((x, batch[1]))
        return mean + torch.autograd.grad(mean, x, create_graph=True)[0].square().sum()


def penalised(_: str, options):
    """Fit it; a worker function."""
    return run(Penalised, options)


def test_a_loss_made_of_such_gradients_is_that_of_the_batch():
    assert_as_on_one_device(penalised, "", {"layout": "1-1", "microbatches": 2, "capture": "joint", "check": True})
