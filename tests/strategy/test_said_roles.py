"""Numbers that a replayed step logs or returns are those of the whole batch, or it is said that they are not."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import World
from strategy.fits import dapple, make_trainer

REPLAYED = {"capture": "replay", "microbatches": 2, "cache": "off"}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 3)
        self.returned: list[list[float]] = []

    def both(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.two(torch.tanh(self.one(batch["x"])))
        return out, F.cross_entropy(out, batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class EveryKind(Net):
    def training_step(self, batch, batch_idx):
        out, loss = self.both(batch)
        right = out.argmax(1) == batch["y"]
        self.log("correct", right.sum())
        self.log("correct, as a float", right.sum().to(out), reduce_fx="sum", on_epoch=True)
        self.log("a mean that is summed over batches", 2 * loss.detach(), reduce_fx=torch.sum, on_epoch=True)
        self.log("a mean whose maximum is wanted", 3 * loss.detach(), reduce_fx="max", on_epoch=True)
        self.log_dict({"max": out.max(), "min": out.min(), "step": self.global_step, "mean": out.mean().item()})
        self.log("a count in Python", (batch["y"] >= 1).sum().item())
        return {"loss": loss, "correct": right.sum(), "total": out.detach().sum(), "top": out.detach().amax()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.returned.append([float(outputs[name]) for name in ("correct", "total", "top")])

    def validation_step(self, batch, batch_idx):
        out, loss = self.both(batch)
        self.log_dict({"val_loss": loss, "val_max": out.max()})
        self.log("val_correct", (out.argmax(1) == batch["y"]).sum(), reduce_fx="sum")


class Seen(pl.Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, *_):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(kind: type[Net], options: dict[str, Any] | None) -> tuple[list[dict[str, float]], list[list[float]], list[str]]:
    """Return all metrics after every batch, what hooks got of the outputs, and warnings; a worker function."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        module = kind().double()
        data = [{"x": torch.randn(8, dtype=torch.float64), "y": torch.randint(3, ())} for _ in range(14)]
    seen = Seen()
    strategy = "auto" if options is None else dapple(**options)
    trainer = make_trainer(strategy, max_epochs=2, callbacks=[seen], num_sanity_val_steps=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, *(DataLoader(data, batch_size=5) for _ in ("train", "validate")))
    seen.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    return seen.metrics, module.returned, [str(one.message) for one in caught]


def test_sums_means_and_extremes_are_those_of_the_whole_batch() -> None:
    """A mean that `reduce_fx="sum"` adds over batches was added over micro-batches too, and a count was averaged."""
    metrics, returned, _ = fit(EveryKind, None)
    for found, outputs, _ in World(2).run(fit, EveryKind, {**REPLAYED, "layout": "1-1"}):
        for one, expected in zip(found, metrics, strict=True):
            assert one == pytest.approx(expected, rel=1e-9)
        for row, expected_row in zip(outputs, returned, strict=True):
            assert row == pytest.approx(expected_row, rel=1e-9)


class Spread(Net):
    def training_step(self, batch, batch_idx):
        out, loss = self.both(batch)
        self.log("spread", out.std())
        self.log("mean", out.mean())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("perplexity", self.both(batch)[1].exp())


@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_what_is_none_of_these_is_named_in_training_and_evaluation(capture: str) -> None:
    *_, caught = fit(Spread, {**REPLAYED, "capture": capture})
    told = [text for text in caught if "logs what is no sum" in text]
    assert [("'spread' at" in one, "'perplexity' at" in one, "'mean'" in one) for one in told] == [
        (True, False, False),
        (False, True, False),
    ]


class RareClass(Net):
    """The share is zero until the third batch."""

    def training_step(self, batch, batch_idx):
        _, loss = self.both(batch)
        self.log("share", ((batch["x"][:, 0] > 0) & (self.global_step >= 2)).double().mean())
        return loss


def test_a_number_that_did_not_tell_its_role_is_named_when_micro_batches_begin_to_differ() -> None:
    *_, caught = fit(RareClass, REPLAYED)
    (told,) = [text for text in caught if "log different values of" in text]
    assert "'share' at" in told and "test_said_roles.py:" in told
