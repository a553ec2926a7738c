"""Losses of all kinds over one small module, and fits that keep their losses and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from strategy.fits import checked, make_trainer

SAMPLES, WIDTH, CLASSES, IGNORED = 8, 8, 4, -100
Loss = Callable[["Module", torch.Tensor, torch.Tensor], torch.Tensor]


class Module(pl.LightningModule):
    """A linear layer before a loss; `learned` and `weight` are for losses that need a parameter or a buffer."""

    def __init__(self, loss: Loss, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.norm, self.dropout = nn.BatchNorm1d(CLASSES), nn.Dropout(dropout)
        self.learned = nn.Parameter(torch.ones(()))
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 3.0, 10.0]))
        self.loss, self.gradients = [loss], {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = self.loss[0](self, self.last(torch.tanh(self.dropout(self.first(x)))), y)
        self.log("logged", loss)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def each(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of every sample, of those without a target too."""
    return F.cross_entropy(o, y.clamp(min=0), reduction="none")


def kept(y: torch.Tensor) -> torch.Tensor:
    return y != IGNORED


def summed(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (each(o, y) * kept(y)).sum()


def looped(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = 0
    for scale in (1.0, 0.5):
        loss = loss + summed(scale * o, y)
    return loss


def penalty(m: Module) -> torch.Tensor:
    return 0.1 * m.last.weight.pow(2).sum()


def counts(y: torch.Tensor) -> torch.Tensor:
    return F.one_hot(y.clamp(min=0), CLASSES).sum(0)


SUMS: dict[str, Loss] = {
    "sum": lambda m, o, y: summed(o, y),
    "zero plus a sum": lambda m, o, y: looped(o, y),
    "python's sum": lambda m, o, y: sum([summed(o, y), summed(2 * o, y)]),
    "two sums": lambda m, o, y: summed(o, y) + 0.1 * F.mse_loss(o, torch.zeros_like(o), reduction="sum"),
    "kl by hand": lambda m, o, y: summed(o, y) - 0.5 * torch.sum(1 + o - o.pow(2) - o.exp()),
    "clamp": lambda m, o, y: summed(o, y).clamp(max=1e6),
    "maximum": lambda m, o, y: torch.maximum(summed(o, y), torch.tensor(1e-6)),
    "nan_to_num": lambda m, o, y: torch.nan_to_num(summed(o, y)),
    "where": lambda m, o, y: torch.where(torch.isfinite(summed(o, y)), summed(o, y), torch.zeros(())),
    "mean times samples": lambda m, o, y: each(o, y).mean() * o.shape[0],
    "mean times len": lambda m, o, y: o.pow(2).mean() * len(y),
    "einsum": lambda m, o, y: torch.einsum("ni,ni->", o, o),
    "dot": lambda m, o, y: torch.dot(o.flatten(), o.flatten()),
    "matmul": lambda m, o, y: o.flatten() @ o.flatten(),
    "stacked sums": lambda m, o, y: torch.stack([o[:, 0].sum(), o[:, 1].pow(2).sum()]).sum(),
    "learned factor": lambda m, o, y: summed(o, y) * m.learned,
    "mean times a float": lambda m, o, y: o.pow(2).mean() * float(len(y)),
    "mean times a tensor": lambda m, o, y: o.pow(2).mean() * torch.tensor(len(y)),
}

TERMS: dict[str, Loss] = {
    "sum and penalty": lambda m, o, y: summed(o, y) + penalty(m),
    "uncertainty": lambda m, o, y: summed(o, y) * torch.exp(-m.learned) + m.learned,
    "mean and sum": lambda m, o, y: each(o, y).mean() + 0.1 * o.pow(2).sum(),
    "masked mean, mean and penalty": lambda m, o, y: (
        summed(o, y) / kept(y).sum() + o.pow(2).mean() * m.learned + penalty(m)
    ),
    "a sum twice": lambda m, o, y: (lambda s: (s + o.abs().sum()) + (s + penalty(m)))(summed(o, y)),
}

COUNTED: dict[str, Loss] = {
    "Python's maximum of a count": lambda m, o, y: summed(o, y) / max(1.0, kept(y).sum()),
    "ignore_index": lambda m, o, y: F.cross_entropy(o, y),
    "class weights": lambda m, o, y: F.cross_entropy(o, y, weight=m.weight),
    "smoothing": lambda m, o, y: F.cross_entropy(o, y, label_smoothing=0.1),
    "smoothing and class weights": lambda m, o, y: F.cross_entropy(o, y, weight=m.weight, label_smoothing=0.1),
    "weights from counts": lambda m, o, y: F.cross_entropy(o, y, weight=1 / (1 + counts(y).double())),
    "ignored and penalty": lambda m, o, y: F.cross_entropy(o, y) + penalty(m),
    "ignored and sum": lambda m, o, y: F.cross_entropy(o, y) + 0.1 * o.pow(2).sum(),
    "nll": lambda m, o, y: F.nll_loss(o.log_softmax(-1), y),
    "two dimensions": lambda m, o, y: F.cross_entropy(
        torch.stack([o, 2 * o], -1), torch.stack([y, y.clamp(min=0)], -1)
    ),
    "masked mean": lambda m, o, y: summed(o, y) / kept(y).sum(),
    "masked mean, clamped": lambda m, o, y: summed(o, y) / kept(y).sum().clamp(min=1),
    "masked mse": lambda m, o, y: ((o - 1).square() * kept(y)[:, None]).sum() / (kept(y).sum() * CLASSES).clamp(min=1),
    "mean of masks": lambda m, o, y: (each(o, y) * kept(y)).mean() / kept(y).float().mean(),
    "token weights": lambda m, o, y: (each(o, y) * (y + 200.0)).sum() / (y + 200.0).sum(),
    "weights that add to one": lambda m, o, y: (each(o, y) * (kept(y) / kept(y).sum())).sum(),
    "focal": lambda m, o, y: ((1 - torch.exp(-each(o, y))) ** 2 * each(o, y) * kept(y)).sum() / kept(y).sum(),
    "positive weight": lambda m, o, y: F.binary_cross_entropy_with_logits(
        o[:, 0], (y == 1).float(), pos_weight=(y != 1).sum() / (y == 1).sum().clamp(min=1)
    ),
    "standardised targets": lambda m, o, y: F.mse_loss(o[:, 0], (y - y.double().mean()) / y.double().std()),
}

MEANS: dict[str, Loss] = {
    "mean": lambda m, o, y: each(o, y).mean(),
    "means of sums": lambda m, o, y: o.pow(2).sum(-1).mean(),
    "batchmean": lambda m, o, y: F.kl_div(o.log_softmax(-1), torch.full_like(o, 0.25), reduction="batchmean"),
    "normalised by lengths": lambda m, o, y: (o.pow(2).sum(-1) / (y + 101).clamp(min=1)).mean(),
    "sum by all elements": lambda m, o, y: each(o, y).masked_fill(~kept(y), 0).sum() / y.numel(),
    "sum by a float": lambda m, o, y: summed(o, y) / float(len(y)),
    "sum by a tensor": lambda m, o, y: summed(o, y) / torch.tensor(len(y)),
    "each by samples": lambda m, o, y: (each(o, y) * kept(y) / len(y)).sum(),
    "each by a float": lambda m, o, y: (each(o, y) * kept(y) / float(len(y))).sum(),
}

MIXED: dict[str, Loss] = {
    "ratio of sums": lambda m, o, y: o.pow(2).sum() / o.abs().sum(),
    "dice": lambda m, o, y: 1 - 2 * o.sigmoid()[:, 0].sum() / (o.sigmoid().sum() + 1),
    "root of a mean": lambda m, o, y: o.pow(2).mean().sqrt(),
    "norm": lambda m, o, y: (o - 1).norm(),
    "extreme": lambda m, o, y: each(o, y).max(),
    "logsumexp": lambda m, o, y: torch.logsumexp(each(o, y), 0),
    "exponential": lambda m, o, y: each(o, y).mean().exp(),
    "square of a mean": lambda m, o, y: (lambda s: s * s)(each(o, y).mean()),
    "variance": lambda m, o, y: o.var(0).mean(),
    "batch statistics": lambda m, o, y: each(m.norm(o), y).mean(),
    "contrastive": lambda m, o, y: F.cross_entropy(o @ o.t(), torch.arange(len(y), device=y.device)),
    "ranks": lambda m, o, y: (o[:, 0] - torch.logcumsumexp(o[:, 0], 0)).mean(),
    "hardest": lambda m, o, y: each(o, y).topk(2)[0].mean(),
    "first sample": lambda m, o, y: o[0].pow(2).sum(),
    "flipped": lambda m, o, y: (o * o.flip(0)).mean(),
    "one sample less": lambda m, o, y: o.pow(2).sum() / (len(y) - 1),
}


@dataclass(frozen=True)
class Fitted:
    """What one batch gave: its loss, as returned and as logged, gradients, and warnings about micro-batches."""

    losses: tuple[float, float]
    gradients: dict[str, torch.Tensor]
    warned: list[str]


def batch(*, targets: str = "uneven", seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return samples; of eight targets, three are ignored ("uneven", the first two among them), all, or none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    ignored = {"uneven": [0, 1, 3], "none": [], "all": list(range(SAMPLES))}[targets]
    y[ignored] = IGNORED
    return list(zip(x, y, strict=True))


def fit(
    loss: Loss,
    strategy: Any = "auto",
    *,
    targets: str = "uneven",
    dropout: float = 0.0,
    devices: int = 1,
    seed: int = 1,
    batches: int = 1,
) -> Fitted:
    """Train one batch, or the same one some times; return what the last time gave."""
    torch.manual_seed(0)
    module, losses = Module(loss, dropout=dropout).double(), []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            losses.append((float(outputs["loss"]), float(trainer.callback_metrics["logged"])))

    trainer = make_trainer(strategy, max_epochs=1, callbacks=[Keep()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(batch(targets=targets, seed=seed) * batches, batch_size=SAMPLES))
    said = [str(one.message) for one in caught if "micro-batches" in str(one.message)]
    return Fitted(losses[-1], module.gradients, said)


def fit_cut(loss: Loss, *, capture: str = "joint", microbatches: int = 4, **options: Any) -> Fitted:
    """Train one batch in micro-batches, all forwards first: losses may need all samples."""
    return fit(loss, checked(capture=capture, microbatches=microbatches, schedule="gpipe"), **options)


def worst(one: Fitted, two: Fitted) -> float:
    """Return the largest relative difference of losses and gradients; what is no number on both sides agrees."""
    pairs = [(torch.tensor(a), torch.tensor(b)) for a, b in zip(one.losses, two.losses, strict=True)]
    names = {*one.gradients, *two.gradients}
    zero = torch.zeros(())
    pairs += [(one.gradients.get(name, zero), two.gradients.get(name, zero)) for name in names]
    found = []
    for a, b in pairs:
        apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
        scale = max(float(b.abs().nan_to_num().max()), 1e-9)  # of what adds up to 0 rounding is left
        found.append(float(apart.nan_to_num(nan=torch.inf).max()) / scale)
    return max(found)
