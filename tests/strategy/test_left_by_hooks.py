"""What hooks of a batch's transfer leave on the module is there for the step of every rank, as on one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer


class Net(pl.LightningModule):
    """Layers for two stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8).double(), nn.Linear(8, 3).double()

    def loss(self, batch: Any) -> torch.Tensor:
        return F.cross_entropy(self.last(torch.tanh(self.first(batch[0]))), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Number(Net):
    """A number that depends on the batch, and does not exist before."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.share = float(batch[0].abs().mean())
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * self.share

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch) * self.share)


class BeforeTransfer(Number):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.share = float(batch[0].abs().mean())
        return batch

    on_after_batch_transfer = pl.LightningModule.on_after_batch_transfer


class Counted(Net):
    """How many batches have come, which the look at the first batch must not count."""

    seen = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen += 1
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * (1 + 0.1 * self.seen)


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []
        self.last_of: dict[str, torch.Tensor] = {}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.means.append(float(batch[0].mean()))
        self.last_of["scale"] = 1 + batch[0].square().mean()
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) * self.last_of["scale"] + sum(self.means)


class Large(Net):
    """What is no number is of no use to other ranks, and no harm."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.kept, self.made = torch.zeros(2**19), (x for x in batch)
        return batch


KINDS = {cls.__name__: cls for cls in (Number, BeforeTransfer, Counted, Listed, Large)}


def fitted(name: str, options: dict[str, Any] | None) -> tuple[list[float], dict[str, float], dict[str, torch.Tensor]]:
    """Return losses, logged values and parameters; a worker function."""
    module, losses = KINDS[name](), Losses()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(3, (20,), generator=generator))
    strategy = "auto" if options is None else dapple(**options)
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[losses])
    trainer.fit(module, DataLoader(data, 4), DataLoader(data, 5))
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return losses.losses, metrics, {key: p.detach().clone() for key, p in module.named_parameters()}


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
@pytest.mark.parametrize("name", KINDS)
def test_what_hooks_leave_is_there_on_ranks_that_load_nothing(name: str, options: dict[str, Any]) -> None:
    """A share of a mixup that such a hook sets was 1 for the stages that load nothing, or missing."""
    losses, metrics, parameters = fitted(name, None)
    for found in World(sum(map(int, options["layout"].split("-")))).run(fitted, name, options):
        assert found[0] == pytest.approx(losses, rel=1e-9)
        assert found[1] == pytest.approx(metrics, rel=1e-6)
        torch.testing.assert_close(found[2], parameters, rtol=1e-9, atol=1e-9)
