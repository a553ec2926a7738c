"""A step that uses parameters of other stages from a later batch on trains as one device does: both hold them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ranks.world import World
from strategy.fits import dapple, make_trainer


class Net(pl.LightningModule):
    """Layers for three stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.double()
        self.losses: list[float] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))), y)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch) + self.first.weight.square().mean())

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class LatePenalty(Net):
    """A penalty on the first layer from the second epoch on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        return loss + 0.1 * self.first.weight.square().sum() if self.current_epoch else loss


class Sometimes(Net):
    """The penalty in every other epoch: steps of before come back."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        return loss + 0.1 * self.first.weight.square().sum() if self.current_epoch % 2 else loss


class Consolidated(Net):
    """Elastic weight consolidation: distances of all parameters from what they were after the first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            for name, parameter in list(self.named_parameters()):
                self.register_buffer(f"old_{name.replace('.', '_')}", parameter.detach().clone())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if self.current_epoch:
            for name, parameter in self.named_parameters():
                loss = loss + 0.5 * (parameter - getattr(self, f"old_{name.replace('.', '_')}")).square().sum()
        return loss


class Cropped(Net):
    """Sequences that grow with the step, so that other graphs are cut elsewhere."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        tokens = x[:, None].expand(-1, 8, -1)[:, : min(8, 2 + self.global_step)]
        hidden = self.first(tokens).mean(1)
        return F.cross_entropy(self.last(torch.tanh(self.middle(torch.tanh(hidden)))), y)


KINDS = {kind.__name__: kind for kind in (LatePenalty, Sometimes, Consolidated, Cropped)}


def fitted(kind: str, options: dict[str, Any] | None, trainer: dict[str, Any]) -> Any:
    """Return losses, logged values, parameters and what was said; a worker function."""
    module = KINDS[kind]()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(3, (16,), generator=generator))
    with warnings.catch_warnings(record=True) as caught:
        made = make_trainer("auto" if options is None else dapple(**options), max_epochs=4, **trainer)
        warnings.simplefilter("always")
        made.fit(module, DataLoader(data, 4), DataLoader(data, 8))
    said = [str(one.message) for one in caught if "Both hold them from now on" in str(one.message)]
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    return module.losses, {k: float(v) for k, v in made.callback_metrics.items()}, parameters, said


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({"layout": "1-1-1", "microbatches": 2}, {}),
        ({"layout": "1-1-1", "microbatches": 2}, {"gradient_clip_val": 0.1}),
        ({"layout": "1-1-1", "microbatches": 2}, {"accumulate_grad_batches": 3}),
        ({"layout": "2-1-1", "microbatches": 2}, {}),
        ({"layout": "2-1-1", "microbatches": 2, "shard_optimizer": True}, {}),
    ],
    ids=["three stages", "clipped", "accumulated", "replicas", "sharded"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_stages_hold_what_they_use_from_a_later_batch_on(kind: str, options: Any, trainer: Any) -> None:
    """Training ended there, with an error."""
    losses, metrics, parameters, _ = fitted(kind, None, trainer)
    ranks = World(sum(map(int, options["layout"].split("-")))).run(fitted, kind, options, trainer)
    for found in ranks:
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[1] == pytest.approx(metrics, rel=1e-6)
        torch.testing.assert_close(found[2], parameters, rtol=1e-9, atol=1e-9)
    assert len(ranks[0][3]) == (kind != "Cropped")


PLAN = """\
stages:
- {at: '', ranks: [0]}
- {at: clone, ranks: [1]}
microbatches: 2
"""


def test_stages_hold_what_they_train_without_reading_it(tmp_path: Path) -> None:
    """The gradient of a weight does not need its values: a stage of a later graph made it for what it did not hold."""
    (tmp_path / "plan.yaml").write_text(PLAN)
    losses, _, parameters, _ = fitted("Cropped", None, {})
    ranks = World(2).run(fitted, "Cropped", {"plan": str(tmp_path / "plan.yaml")}, {})
    for found in ranks:
        assert found[0] == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(found[2], parameters, rtol=1e-9, atol=1e-9)
    assert len(ranks[0][3]) == 1
