"""Results of all kinds that a step may return, log or give to metrics, of its outputs, targets and module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

CLASSES = 4
Result = Callable[[Any, torch.Tensor, torch.Tensor], Any]  # of the module, its outputs (samples, classes), targets


def each(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(o, y, reduction="none")


def hits(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return o.argmax(1) == y


NUMBERS: dict[str, Result] = {
    "mean": lambda m, o, y: o.mean(),
    "sum": lambda m, o, y: o.sum(),
    "largest": lambda m, o, y: o.max(),
    "smallest": lambda m, o, y: o.min(),
    "accuracy": lambda m, o, y: hits(o, y).float().mean(),
    "hits": lambda m, o, y: hits(o, y).sum(),
    "hits by size": lambda m, o, y: hits(o, y).sum() / len(y),
    "hits by tensor": lambda m, o, y: hits(o, y).sum() / torch.tensor(len(y)),
    "hits by new tensor": lambda m, o, y: hits(o, y).sum() / o.new_tensor(len(y)),
    "each by size": lambda m, o, y: (each(o, y) / len(y)).sum(),
    "precision": lambda m, o, y: ((o.argmax(1) == 1) & (y == 1)).sum() / ((o.argmax(1) == 1).sum() + 1),
    "masked mean": lambda m, o, y: (each(o, y) * (y > 1)).sum() / (y > 1).sum(),
    "count": lambda m, o, y: (y > 1).sum(),
    "share": lambda m, o, y: (y > 1).float().mean(),
    "any": lambda m, o, y: (o > 0.45).any(),
    "none": lambda m, o, y: ~(o > 0.45).any(),
    "all": lambda m, o, y: (o > -0.3).all(),
    "classes seen": lambda m, o, y: (F.one_hot(y, CLASSES).sum(0) > 0).sum(),
    "entropy of a mean": lambda m, o, y: (lambda p: -(p * p.log()).sum())(o.softmax(1).mean(0)),
    "sparsity": lambda m, o, y: o.abs().sum() / o.pow(2).sum().sqrt(),
    "explained": lambda m, o, y: 1 - ((o[:, 0] - y) ** 2).sum() / ((y - y.double().mean()) ** 2).sum(),
    "norm of rows": lambda m, o, y: o.norm(dim=1).mean(),
    "weights": lambda m, o, y: m.layers[0].weight.norm(),
    "weights and outputs": lambda m, o, y: m.layers[0].weight.sum() * o.mean(),
    "size": lambda m, o, y: torch.tensor(len(y)),
    "numbers": lambda m, o, y: o.numel(),
    "reciprocal": lambda m, o, y: 1.0 / len(y),
    "root of the size": lambda m, o, y: len(y) ** 0.5,
    "epoch": lambda m, o, y: m.current_epoch,
    "read": lambda m, o, y: o.mean().item(),
    "read sum": lambda m, o, y: o.sum().item(),
    "read deviation": lambda m, o, y: o.std().item(),
    "product": lambda m, o, y: o.prod(),
    "deviation": lambda m, o, y: o.std(),
    "variance": lambda m, o, y: o.var(unbiased=False),
    "median": lambda m, o, y: o.median(),
    "quantile": lambda m, o, y: torch.quantile(o, 0.3),
    "norm": lambda m, o, y: o.norm(),
    "distances": lambda m, o, y: torch.cdist(o, o).mean(),
    "differences": lambda m, o, y: o.diff(dim=0).mean(),
    "place of the largest": lambda m, o, y: o.argmax(),
    "first": lambda m, o, y: o[0].sum(),
    "last": lambda m, o, y: o[-1].sum(),
    "first target": lambda m, o, y: y[0],
    "commonest": lambda m, o, y: y.mode()[0],
    "hardest": lambda m, o, y: each(o, y).topk(2)[0].mean(),
    "numbered": lambda m, o, y: (torch.arange(len(y), device=y.device) * o[:, 0]).mean(),
}
TENSORS: dict[str, Result] = {
    "means": lambda m, o, y: o.mean(0),
    "by class": lambda m, o, y: o.new_zeros(CLASSES).index_add(0, y, each(o, y)),
    "mean by class": lambda m, o, y: (
        o.new_zeros(CLASSES).index_add(0, y, each(o, y)) / F.one_hot(y, CLASSES).sum(0).clamp(min=1)
    ),
    "scattered": lambda m, o, y: torch.zeros(CLASSES, dtype=torch.long, device=y.device).scatter_add(
        0, y, torch.ones_like(y)
    ),
    "largest by class": lambda m, o, y: o.new_full((CLASSES,), -9.0).scatter_reduce(0, y, each(o, y), "amax"),
    "largest of each": lambda m, o, y: o.max(0)[0],
    "where they are": lambda m, o, y: o.max(0)[1],
    "any of each": lambda m, o, y: (o > 0.4).any(0),
    "products": lambda m, o, y: o.T @ o,
    "log sums": lambda m, o, y: o.logsumexp(0),
    "deviations": lambda m, o, y: o.std(0),
    "largest two": lambda m, o, y: o.topk(2, 0)[0],
    "constant": lambda m, o, y: torch.zeros(3),
    "tuple": lambda m, o, y: (o.sum(), o.mean(), [o.max()]),
    "nothing": lambda m, o, y: None,
    "text": lambda m, o, y: "a",
    "targets": lambda m, o, y: y,
    "probabilities": lambda m, o, y: o.softmax(1),
    "in a row": lambda m, o, y: o.flatten(),
    "turned": lambda m, o, y: o.T,
    "stacked": lambda m, o, y: torch.stack([o, 2 * o]),
    "repeated": lambda m, o, y: o.repeat_interleave(2, 0),
    "in squares": lambda m, o, y: o.view(-1, 2, 2),
    "as many ones": lambda m, o, y: torch.ones(len(y)),
    "first rows": lambda m, o, y: o[:2],
    "last rows": lambda m, o, y: o[-2:],
    "centered": lambda m, o, y: o - o.mean(0),
    "shares of the batch": lambda m, o, y: o.softmax(0),
    "by their number": lambda m, o, y: o / len(y),
    "sorted": lambda m, o, y: o.sort(0)[0],
    "flipped": lambda m, o, y: o.flip(0),
    "rolled": lambda m, o, y: o.roll(1, 0),
    "ranks": lambda m, o, y: o[:, 0].argsort().argsort(),
    "sums so far": lambda m, o, y: o.cumsum(0),
    "their numbers": lambda m, o, y: torch.arange(len(y), device=y.device),
}
FIXED: dict[str, Result] = {  # of which a graph holds for one number of samples
    "hits by float": lambda m, o, y: hits(o, y).sum() / float(len(y)),
    "each by float": lambda m, o, y: (each(o, y) / float(len(y))).sum(),
    "times float": lambda m, o, y: each(o, y).mean() * float(len(y)),
    "times int": lambda m, o, y: each(o, y).mean() * len(y),
    "weights and float": lambda m, o, y: m.layers[2].weight.pow(2).sum() + 0 * float(len(y)),
    "means and float": lambda m, o, y: o.mean(0) * (1 + 0 * float(len(y))),
    "counts and float": lambda m, o, y: F.one_hot(y, CLASSES).sum(0) * (1 + 0 * int(float(len(y)))),
    "sizes": lambda m, o, y: torch.tensor([len(y), 2]),
    "rows by float": lambda m, o, y: o / float(len(y)),
    "rows": lambda m, o, y: o * o.new_tensor([1.0 + 0 * float(len(y))] * CLASSES),
    "first half": lambda m, o, y: o[: max(1, int(0.5 * len(y)))].mean(),
    "hardest half": lambda m, o, y: each(o, y).topk(max(1, int(0.5 * len(y))))[0].mean(),
    "root by float": lambda m, o, y: (o.pow(2).sum() / float(len(y))).sqrt(),
}
