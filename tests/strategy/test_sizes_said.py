"""Numbers that leave a step (sizes in outputs, in logs) are Python numbers of the whole batch, on every rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import World
from strategy.fits import dapple, make_trainer

WIDTH, CLASSES, SAMPLES, BATCH = 8, 5, 44, 8  # the last batch has four samples
ROUNDING = 1e-9


class Pair(NamedTuple):
    n: int
    sizes: list[int]


@dataclass(frozen=True)
class Frozen:
    n: int


class Counting(pl.LightningModule):
    """Returns and logs sizes, and numbers made of them; adds them up in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.said: list[Any] = []
        self.total, self.hits, self.weighted = 0, 0.0, 0.0

    def shared_step(self, batch):
        x, y = batch
        logits = self.head(self.blocks(x))
        loss = F.cross_entropy(logits, y)
        hits = (logits.argmax(1) == y).to(x.dtype)
        return loss, {
            "loss": loss,
            "n": x.shape[0],
            "sizes": [len(y), 2 * len(y), x.numel()],
            "quarter": len(y) / 4,
            "float": float(y.numel()),
            "constant": 3,
            "read": loss.item(),
            "hits": hits.detach().mean() * x.shape[0],
            "shape": x.shape,
            "pair": Pair(len(y), [x.shape[1]]),
            "frozen": Frozen(x.numel()),
            "table": defaultdict(list, {"n": [len(y), WIDTH]}),
        }

    def training_step(self, batch, batch_idx):
        loss, said = self.shared_step(batch)
        self.log("samples", float(len(batch[1])), on_step=True, on_epoch=False)
        self.log("mean", loss, on_epoch=True, on_step=False, batch_size=len(batch[1]))
        return said

    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch)[1]

    def keep(self, outputs):
        self.said.append({k: v for k, v in outputs.items() if k not in ("loss", "hits")})
        self.total += outputs["n"]
        self.weighted += float(outputs["loss"]) * outputs["n"]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.keep(outputs)

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.keep(outputs)

    def on_train_epoch_end(self):
        self.log("epoch_loss", self.weighted / self.total)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Fixed(Counting):
    """Its Python counts samples one by one, so a graph holds for one number of them."""

    def shared_step(self, batch):
        loss, said = super().shared_step(batch)
        return loss, {**said, "counted": sum(1 for _ in range(len(batch[1])))}


MODULES = {"Counting": Counting, "Fixed": Fixed}


def loader(batch_size: int = BATCH) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return DataLoader(list(zip(x, y, strict=True)), batch_size=batch_size)


def said(name: str, options: dict[str, Any] | None) -> tuple[list[Any], dict[str, float]]:
    """Fit on all ranks of this world, or plainly, and return the numbers that hooks got; a worker function."""
    torch.manual_seed(0)
    module = MODULES[name]().double()
    strategy = "auto" if options is None else dapple(**options)
    trainer = make_trainer(strategy, max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, loader(), loader())
    return module.said, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.sampled(every=1)
@pytest.mark.parametrize("route", ["joint", "replay"])
@pytest.mark.parametrize("name", MODULES)
def test_numbers_of_a_step_are_those_of_the_whole_batch(name: str, route: str) -> None:
    expected, metrics = said(name, None)
    assert sum(one["n"] for one in expected) == 2 * SAMPLES
    for found, found_metrics in World(2).run(said, name, {"layout": "1-1", "microbatches": 2, "capture": route}):
        for one, other in zip(found, expected, strict=True):
            assert one.pop("read") == pytest.approx(other["read"], rel=ROUNDING)
            assert one == {key: value for key, value in other.items() if key != "read"}
            kinds = {key: type(value) for key, value in one.items()}
            assert kinds == {key: type(value) for key, value in other.items() if key != "read"}
        assert found_metrics == pytest.approx(metrics, rel=1e-6)
