"""A step that turns `requires_grad` of parameters on or off trains as one device does, from that batch on."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.errors import CaptureError
from ranks.world import World
from strategy.fits import dapple, make_trainer


class Net(pl.LightningModule):
    """Layers for two stages; what moves in an optimizer with momentum shows which batches had gradients."""

    frozen = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.double()
        self.first.requires_grad_(not self.frozen)

    def turn(self, batch_idx: int) -> None:
        """Turn flags before the forward."""

    def turn_back(self, batch_idx: int) -> None:
        """Turn flags after it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.turn(batch_idx)
        x, y = batch
        loss = F.cross_entropy(self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))), y)
        self.turn_back(batch_idx)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class UnfrozenFirst(Net):
    frozen = True

    def turn(self, batch_idx: int) -> None:
        self.first.requires_grad_(True)


class UnfrozenLater(Net):
    frozen = True

    def turn(self, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 0:
            self.first.requires_grad_(True)


class UnfrozenBehind(Net):
    """For the next batch on."""

    frozen = True

    def turn_back(self, batch_idx: int) -> None:
        if batch_idx == 1:
            self.first.requires_grad_(True)


class FrozenLater(Net):
    def turn(self, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 0:
            self.first.requires_grad_(False)


class FrozenBehind(Net):
    def turn_back(self, batch_idx: int) -> None:
        if batch_idx == 1:
            self.middle.requires_grad_(False)


class ByStep(Net):
    frozen = True

    def turn(self, batch_idx: int) -> None:
        self.first.requires_grad_(self.global_step >= 3)


class FrozenWithin(Net):
    """As the turns of a GAN: on again at the end, where only the last stage comes."""

    def turn(self, batch_idx: int) -> None:
        self.middle.requires_grad_(batch_idx % 2 == 0)

    def turn_back(self, batch_idx: int) -> None:
        self.middle.requires_grad_(True)


class Inverted(Net):
    """A step that micro-batches must not do one after another."""

    def turn(self, batch_idx: int) -> None:
        self.first.requires_grad_(not self.first.weight.requires_grad)


KINDS = {
    kind.__name__: kind
    for kind in (
        UnfrozenFirst,
        UnfrozenLater,
        UnfrozenBehind,
        FrozenLater,
        FrozenBehind,
        ByStep,
        FrozenWithin,
        Inverted,
    )
}


def fitted(kind: str, options: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], dict[str, bool]]:
    """Return parameters, and which are trained in the end; a worker function."""
    module = KINDS[kind]()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(3, (16,), generator=generator))
    trainer = make_trainer("auto" if options is None else dapple(**options), max_epochs=2)
    trainer.fit(module, DataLoader(data, 4))
    named = dict(module.named_parameters())
    return {name: p.detach().clone() for name, p in named.items()}, {name: p.requires_grad for name, p in named.items()}


@pytest.mark.sampled
@pytest.mark.parametrize("capture", ["auto", "replay"])
@pytest.mark.parametrize("layout", ["1", "1-1", "2-1"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_trained_from_the_batch_on_that_says_so(kind: str, layout: str, capture: str) -> None:
    """A parameter that the step let be trained stayed as it was for a batch, or for good."""
    parameters, trained = fitted(kind, None)
    options = {"layout": layout, "microbatches": 2, "capture": capture}
    ranks = sum(map(int, layout.split("-")))
    for found in World(ranks).run(fitted, kind, options) if ranks > 1 else [fitted(kind, options)]:
        torch.testing.assert_close(found[0], parameters, rtol=1e-9, atol=1e-9)
        assert found[1] == trained


def test_one_graph_cannot_turn_them() -> None:
    with pytest.raises(CaptureError, match=r"it turns requires_grad of first\.bias on or off"):
        fitted("UnfrozenFirst", {"capture": "joint"})
