"""A loss is proven a mean or a sum over samples by the operations behind it, and nothing else is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_pipe.capture.recording.unit_loss import combine_of, is_proven, reductions

SCALE, WEIGHT = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(4, 4))
PROVEN = {
    "mean": {
        "cross entropy": lambda o, y: F.cross_entropy(o, y),
        "smoothed": lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1),
        "scaled logits": lambda o, y: F.cross_entropy(o * SCALE, y),
        "sum by their number": lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(y),
        "and penalty": lambda o, y: F.cross_entropy(o, y) + 0.1 * WEIGHT.pow(2).sum(),
        "two terms": lambda o, y: F.cross_entropy(o, y) + 0.3 * F.mse_loss(o, o.detach() - 1),
        "of rows": lambda o, y: (-0.5 * (1 + o - o.pow(2) - o.exp()).sum(1)).mean(),
    },
    "sum": {"cross entropy": lambda o, y: F.cross_entropy(o, y, reduction="sum")},
}
UNPROVEN = {
    "valid targets": lambda o, y: F.cross_entropy(o, torch.where(y > 0, y, -100)),
    "masked": lambda o, y: (F.cross_entropy(o, y, reduction="none") * (y > 0)).sum() / (y > 0).sum(),
    "selected": lambda o, y: o[y > 1].square().mean(),
    "sum and penalty": lambda o, y: F.cross_entropy(o, y, reduction="sum") + WEIGHT.pow(2).sum(),
    "root": lambda o, y: o.square().mean().sqrt() * SCALE,
    "products of samples": lambda o, y: F.cross_entropy(o @ o.T / SCALE, torch.arange(len(o))),
    "pairs": lambda o, y: ((o[:, None] - o) ** 2).mean(),
    "product of means": lambda o, y: o.mean() * F.cross_entropy(o, y),
    "deviation": lambda o, y: o.std(),
    "along samples": lambda o, y: o.softmax(0).square().mean(),
    "fixed divisor": lambda o, y: F.cross_entropy(o, y, reduction="sum") / 10,
    "by the number of samples": lambda o, y: F.cross_entropy(o, y) * len(y),
}


def runs(loss):
    found = []
    for samples in (7, 6, 3):
        output = torch.linspace(-1, 1, 4 * samples).view(samples, 4).requires_grad_().clone()
        read = reductions(loss(output, torch.arange(samples) % 4), units={output.grad_fn}, samples=samples)
        found.append((samples, read))
    return found


@pytest.mark.parametrize(("law", "name"), [(law, name) for law, losses in PROVEN.items() for name in losses])
def test_the_usual_mean_or_sum_is_proven(law, name):
    found = runs(PROVEN[law][name])
    assert is_proven(found) and combine_of([read for _, read in found]) == law


@pytest.mark.parametrize("name", UNPROVEN)
def test_no_other_loss_is_proven(name):
    assert not is_proven(runs(UNPROVEN[name]))
