"""Replicas share the samples of micro-batches where slices give what the whole gives, and there only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.core.program import Layout
from lightning_pipe.strategy.plans import plan_report
from lightning_pipe.strategy.steps.step_runtime import pieces
from ranks.world import World
from strategy.fits import checked, make_trainer

NEIGHBOURS = torch.full((4, 4, 3), 1 / 12, dtype=torch.float64)


def mse(prediction: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(prediction, target)


def same(hidden: Tensor) -> Tensor:
    return hidden


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "root of a mean": lambda p, y: mse(p, y).sqrt(),
    "extreme": lambda p, y: (p - y).abs().max(),
    "soft maximum": lambda p, y: ((p - y) ** 2).logsumexp(0),
    "first samples": lambda p, y: ((p - y) ** 2)[:3].mean(),
    "neighbours": lambda p, y: (p[1:] - p[:-1]).square().mean() + mse(p, y),
}
MIXERS: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution along the samples": lambda h: F.conv1d(h.t()[None], NEIGHBOURS.to(h), padding=1)[0].t(),
    "layer norm over the samples": lambda h: F.layer_norm(h.t(), (h.size(0),)).t(),
    "samples by index": lambda h: h[(torch.arange(h.size(0), device=h.device) + 1) % h.size(0)],
    "place in the batch": lambda h: h * (torch.arange(h.size(0), device=h.device) % 2)[:, None].to(h.dtype),
    "attention between samples": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None])[0],
}
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": same,
    "dropout of nothing": lambda h: F.dropout(h, 0.0),
    "layer norm": lambda h: F.layer_norm(h, (4,)),
    "own rows": lambda h: h[torch.arange(h.size(0), device=h.device), :2].repeat(1, 2),
}
CASES = {
    **{name: (same, loss) for name, loss in LOSSES.items()},
    **{name: (mixer, mse) for name, mixer in {**MIXERS, **APART}.items()},
}


class Small(pl.LightningModule):
    def __init__(self, mixer: Callable[[Tensor], Tensor], loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 1).double()
        self.mixer, self.loss = mixer, loss

    def training_step(self, batch, batch_idx):
        hidden = self.mixer(torch.tanh(self.first(batch[0])))
        return self.loss(self.last(hidden).squeeze(-1), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(name: str, strategy) -> tuple[dict[str, Tensor], list[str]]:
    """Return the trained parameters, and what was said of replicas."""
    module = Small(*CASES[name])
    torch.manual_seed(4)
    data = TensorDataset(torch.randn(14, 4).double(), torch.randn(14).double())
    trainer = make_trainer(strategy, max_epochs=2)
    texts: list[str] = []
    with mock.patch.object(plan_report, "rank_zero_info", texts.append):
        trainer.fit(module, DataLoader(data, 8))
    said = [text for text in texts if "replicas take whole micro-batches" in text]
    return {n: p.detach().clone() for n, p in module.named_parameters()}, said


def train_on_replicas(names: list[str], **options) -> list[tuple[dict[str, Tensor], list[str]]]:
    return [train(name, checked(layout="2", capture="joint", schedule="gpipe", **options)) for name in names]


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_replicas_train_as_one_device_does_whatever_mixes_samples(part, microbatches):
    names = [*CASES][part::2]
    of_first, _ = World(2).run(partial(train_on_replicas, names, microbatches=microbatches))
    for name, (found, said) in zip(names, of_first, strict=True):
        for parameter, value in train(name, "auto")[0].items():
            torch.testing.assert_close(found[parameter], value, rtol=1e-9, atol=1e-9, msg=f"{name} {parameter}")
        is_whole = name in MIXERS and name != "place in the batch"  # samples meet in the middle of the model
        assert bool(said) == is_whole, f"{name}: {said}"


@pytest.mark.parametrize(
    ("stages", "whole", "expected"),
    [
        ((((0,), (1,))), (), (5, 4)),
        ((((0,), (1, 2))), (), (2, 3, 2, 2)),
        ((((0, 1, 2),)), (), (1, 2, 2, 1, 1, 2)),
        ((((0, 1), (2,))), (0,), (5, 4)),
    ],
)
def test_pieces_are_the_slices_of_the_stage_with_the_most_replicas(stages, whole, expected):
    assert pieces(Layout(stages, frozenset(whole)), (5, 4)) == expected
