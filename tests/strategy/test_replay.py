"""Steps that change with every call train under the trainer, on processes, as accumulation on one device does."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from ranks.world import World
from strategy.fits import Losses, dapple, make_trainer

CLASSES, WIDTH, SAMPLES = 5, 8, 22
ROUNDING = 1e-9


class Layers(pl.LightningModule):
    """Three residual blocks and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))


class Branching(Layers):
    """The answer to a question about data changes after the first batch."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        if logits.detach().sum() > -3:
            logits = logits * 0.5
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss)
        return loss


class Annealed(Layers):
    """The loss changes with the step, the batch and an attribute that a callback sets; values are read into Python."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        beta = min(1.0, 0.1 * self.global_step)
        logits = self(x)
        penalty = float(logits.detach().abs().mean())
        loss = F.cross_entropy(logits, y) * (1 + beta + 0.01 * batch_idx) * self.scale + 0.001 * penalty
        self.log("loss", loss, prog_bar=True)
        self.log("beta", beta, on_step=True, on_epoch=False)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_epoch=True, on_step=False)
        if self.global_step % 2 == 0:
            self.log("even", penalty)
        return {"loss": loss, "logits": logits.detach()}


class Measured(Annealed):
    """Validation reads a value into Python too."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y) * float(logits.abs().max()))
        self.log("val_step", float(self.global_step))


class Mixup(Layers):
    """NumPy decides how samples are mixed."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        share = float(np.random.beta(0.4, 0.4))
        other = torch.from_numpy(np.random.permutation(len(x)))
        logits = self(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])


class Wandering(Layers):
    """Sometimes another block is called."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        order = (0, 1, 2) if self.global_step < 2 else (0, 2, 1)
        for k in order:
            x = x + self.blocks[k](x)
        return F.cross_entropy(self.head(x), y) * float(self.global_step + 1)


class Attaching(Layers):
    """What the first call makes is a constant at first, and is trained later."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        side = self.blocks[0](x)
        side = side.detach() if self.global_step < 2 else side
        for block in self.blocks[1:]:
            x = x + block(x)
        return F.cross_entropy(self.head(x + 0.1 * side), y)


class Detaching(Attaching):
    """What the first call makes is a constant always."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        side = self.blocks[0](x).detach()
        for block in self.blocks[1:]:
            x = x + block(x)
        return F.cross_entropy(self.head(x + 0.1 * side), y)


MODULES = {cls.__name__: cls for cls in (Annealed, Attaching, Branching, Detaching, Measured, Mixup, Wandering)}


class Scaler(pl.Callback):
    """Change an attribute of the module after every batch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.scale *= 0.9


def loader() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return DataLoader(list(zip(x, y, strict=True)), batch_size=8)


def fitted(name: str, options: dict[str, Any], steps: int = 5) -> tuple[list[float], dict[str, torch.Tensor], dict]:
    """Fit on all ranks of this world; a worker function."""
    torch.manual_seed(0)
    module = MODULES[name]().double()
    losses = Losses()
    np.random.seed(7)
    random.seed(7)
    trainer = make_trainer(dapple(witness=True, **options), max_steps=steps, callbacks=[losses, Scaler()])
    trainer.fit(module, loader(), loader())
    return (
        losses.losses,
        {n: p.detach().clone() for n, p in module.named_parameters()},
        {n: float(v) for n, v in trainer.callback_metrics.items()},
    )


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        pytest.param("Annealed", 2, {"microbatches": 3}, marks=pytest.mark.slow),
        ("Annealed", 3, {"microbatches": 2, "layout": "2-1"}),
        pytest.param("Annealed", 2, {"microbatches": 4, "schedule": "interleaved"}, marks=pytest.mark.slow),
        ("Mixup", 2, {"microbatches": 2, "schedule": "gpipe"}),
        ("Measured", 2, {"microbatches": 2}),
        ("Detaching", 2, {"microbatches": 2, "capture": "replay", "layout": "1-1"}),
        ("Mixup", 3, {"microbatches": 2, "layout": "2-1"}),  # replicas see what the last stage sees
        pytest.param("Mixup", 2, {"microbatches": 2, "layout": "2"}, marks=pytest.mark.slow),
    ],
)
def test_a_replayed_step_trains_as_on_one_device(name, ranks, options):
    """Compared with the strategy on one device, which draws the same random numbers."""
    alone = {"microbatches": options["microbatches"]}
    losses, parameters, metrics = fitted(name, alone)
    for found_losses, found, found_metrics in World(ranks).run(fitted, name, options):
        assert found_losses == pytest.approx(losses, rel=ROUNDING)
        assert found_metrics == pytest.approx(metrics, rel=1e-6)
        for parameter, value in parameters.items():
            torch.testing.assert_close(found[parameter], value, rtol=ROUNDING, atol=ROUNDING, msg=parameter)


def test_an_answer_that_changes_leads_to_replay_before_the_step_is_applied(caplog):
    """Captured as a graph with the first answer; the first batch with another one is run again."""
    losses, parameters, _ = fitted("Branching", {"microbatches": 2, "capture": "replay"})
    with caplog.at_level("INFO", logger="lightning_pipe"):
        alone, _, _ = fitted("Branching", {"microbatches": 2})
    assert alone == pytest.approx(losses, rel=ROUNDING)
    assert sum("is replayed from now on: the answer to the question at" in text for text in caplog.messages) == 1
    for found_losses, found, _ in World(2).run(fitted, "Branching", {"microbatches": 2}):
        assert found_losses == pytest.approx(losses, rel=ROUNDING)
        for parameter, value in parameters.items():
            torch.testing.assert_close(found[parameter], value, rtol=ROUNDING, atol=ROUNDING, msg=parameter)


def test_one_device_is_accumulation():
    """The strategy on one device against plain Lightning that is given the micro-batches."""
    losses, parameters, _ = fitted("Annealed", {"microbatches": 1})
    torch.manual_seed(0)
    plain = Annealed().double()
    kept = Losses()
    make_trainer("auto", max_steps=5, callbacks=[kept, Scaler()]).fit(plain, loader(), loader())
    assert losses == pytest.approx(kept.losses, rel=ROUNDING)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(parameters[name], value.detach(), rtol=ROUNDING, atol=ROUNDING, msg=name)


def test_a_step_that_calls_other_modules_ends_with_one_error_on_every_rank():
    with pytest.raises(Exception, match=r"training_step calls blocks\.1(\.0)? where it called"):
        World(2).run(fitted, "Wandering", {"microbatches": 2, "capture": "replay"})


def test_a_value_that_is_trained_later_than_it_was_traced_ends_with_one_error_on_every_rank():
    with pytest.raises(Exception, match=r"differentiates what blocks\.0.* took its values only"):
        World(2).run(fitted, "Attaching", {"microbatches": 2, "capture": "replay", "layout": "1-1"})
