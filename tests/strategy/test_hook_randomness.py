"""Random numbers that hooks draw are those of one device, on every rank, whatever is drawn where batches are loaded."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer

HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
    *("on_validation_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_end"),
)


def drawn() -> tuple[float, ...]:
    """Return a number of every generator of the process; of NumPy's a normal one, which it makes in pairs."""
    return float(torch.rand(())), random.random(), float(np.random.normal())


class Augmented(Dataset[Any]):
    """Samples to which loading adds noise, from all generators."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randint(3, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + 0.1 * sum(drawn()), self.y[index]


class Plain(Augmented):
    """Samples as they are; the order alone is random."""

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Net(pl.LightningModule):
    """A loss with a number that the last hook has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()
        self.share = 1.0
        self.drawn: list[tuple[str, tuple[float, ...]]] = []

    def draw(self, hook: str) -> None:
        found = drawn()
        self.drawn.append((hook, found))
        self.share = 1.0 + found[0]

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.last(torch.tanh(self.first(batch[0]))), batch[1]) * self.share

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Mixed(Net):
    """A mixup on the way to the device: loading ranks alone come there."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        share, *rest = drawn()
        return share * batch[0] + (1 - share) * batch[0].flip(0) + sum(rest), batch[1]


for _hook in HOOKS:
    setattr(Net, _hook, lambda self, *_, hook=_hook: self.draw(hook))

CASES = {"plain": (Net, Plain), "augmented": (Net, Augmented), "mixed": (Mixed, Plain), "both": (Mixed, Augmented)}


def fitted(name: str, options: dict[str, Any] | None, workers: int = 0) -> tuple[Any, Any, Any, Any]:
    """Return what hooks have drawn, losses, logged values and parameters; a worker function."""
    pl.seed_everything(7)
    kind, data = CASES[name]
    module, losses = kind(), Losses()
    strategy = "auto" if options is None else dapple(**options)
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[losses], check_val_every_n_epoch=1)
    loaders = (DataLoader(data(n), 4, shuffle=n == 12, num_workers=workers) for n in (12, 8))
    trainer.fit(module, *loaders)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return module.drawn, losses.losses, metrics, {key: p.detach().clone() for key, p in module.named_parameters()}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "1-1", "microbatches": 2},
        {"layout": "1-1", "microbatches": 2, "capture": "replay"},
        {"layout": "2-1", "microbatches": 2},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("name", CASES)
def test_hooks_draw_the_numbers_of_one_device_on_every_rank(name: str, options: dict[str, Any]) -> None:
    """Ranks that load nothing had drawn fewer numbers when a hook came to draw one."""
    drawn, losses, metrics, parameters = fitted(name, None)
    for found in World(sum(map(int, options["layout"].split("-")))).run(fitted, name, options):
        assert found[0] == drawn
        assert found[1] == pytest.approx(losses, rel=1e-9)
        assert found[2] == pytest.approx(metrics, rel=1e-6)
        torch.testing.assert_close(found[3], parameters, rtol=1e-9, atol=1e-9)
