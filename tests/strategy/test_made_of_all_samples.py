"""What a step makes of all samples of a batch, or of some that it picks, is that of the batch, however this is cut."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from strategy.fits import dapple, make_trainer
from strategy.small import Small, assert_as_on_one_device, loader, run

Made = dict[str, torch.Tensor]
LAYOUTS = [
    {"layout": "1-1", "microbatches": 4},
    {"layout": "2", "microbatches": 2},
    {"layout": "2-1", "microbatches": 2},
]  # of 16 samples, slices have 4, 4, and 4 or 8; of the last batch, half as many


def numbers(x: torch.Tensor, y: torch.Tensor, o: torch.Tensor) -> Made:
    each, first = F.cross_entropy(o, y, reduction="none"), o[:, 1].argsort(descending=True)
    right, guessed = (y[first] == 1).double(), F.one_hot(o.argmax(1), 3)
    hits = (guessed * F.one_hot(y, 3)).sum(0)
    return {
        "deviation": o.std(),
        "norm": o.norm(),
        "median": o.median(),
        "quantile": torch.quantile(o[:, 0], 0.9),
        "correlation": torch.corrcoef(torch.stack([o[:, 0], x[:, 0]]))[0, 1],
        "average precision": (right.cumsum(0) / torch.arange(1, len(y) + 1) * right).sum() / right.sum(),
        "macro F1": (2 * hits / (guessed.sum(0) + F.one_hot(y, 3).sum(0)).clamp(min=1)).mean(),
        "hardest": each.topk(2)[0].mean(),
        "distances": torch.cdist(o, o).mean(),
        "every second": o[::2].mean(),
        "contrastive": F.cross_entropy(o @ x[:, :3].T, torch.arange(len(o))),
        "explained": 1 - (each - each.mean()).pow(2).sum() / each.pow(2).sum(),
    }


def tensors(x: torch.Tensor, y: torch.Tensor, o: torch.Tensor) -> Made:
    rows = F.normalize(o, dim=1)
    return {
        "by column": o.std(0),
        "similar": rows @ rows.T,
        "sorted": o[:, 0].sort()[0],
        "softmax": o.softmax(0),
        "summed up": o.cumsum(0),
        "normalised": (o - o.mean(0)) / o.std(0),
        "turned": o.T,
        "flat": o.T.reshape(-1),
        "reversed": o.flip(0)[:3],
        "even": o[::2],
        "odd": o[1::2],
        "where": o.max(0)[1],
        "half": o.chunk(2)[1],
        "with the mean": torch.cat([o.mean(0, keepdim=True), o]),
        "numbered": torch.arange(len(o)),
        "alike": y[:, None] == y[None, :],
        "weighed": (o * y[:, None]).mean(0).norm(),
    }


def picked(x: torch.Tensor, y: torch.Tensor, o: torch.Tensor) -> Made:
    return {
        "first": o[0],
        "second": o[1],
        "one": o[:1].squeeze(),
        "first three": o[:3],
        "last two": o[-2:],
        "listed": o[[0, 2]],
        "inputs": x[:3],
        "best": o.topk(3, 0)[0],
        "mean of three": o[:3].mean(),
    }


def more_than_a_slice_has(x: torch.Tensor, y: torch.Tensor, o: torch.Tensor) -> Made:
    """Of a slice, the first twelve are all; so are those of the last batch."""
    return {"outputs": o[:12], "inputs": x[:12], "mean": o[:12].mean(), "deviation": o.std()}


MADE = {one.__name__: one for one in (numbers, tensors, picked, more_than_a_slice_has)}


class Net(Small):
    def __init__(self, made: str) -> None:
        super().__init__()
        self.made, self.latest = made, None

    @staticmethod
    def data() -> DataLoader[Any]:
        return loader(40, 16)

    @staticmethod
    def validation() -> DataLoader[Any]:
        return loader(24, 16, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        made = MADE[self.made](*batch, outputs)
        self.log_dict({name: one.double() for name, one in made.items() if one.ndim == 0})
        self.latest = {name: one.detach() for name, one in made.items()}
        return {"loss": F.cross_entropy(outputs, batch[1]), "said": self.latest}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return MADE[self.made](*batch, self(batch[0]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted += [outputs["said"], self.latest]

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append(outputs)


def fit(made: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    return run(lambda: Net(made), options)


@pytest.mark.sampled
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: options["layout"])
def test_it_is_that_of_the_batch(options: dict[str, Any], made: str) -> None:
    assert_as_on_one_device(fit, made, options)


class Large(Small):
    """What is made of a weight, and of more of every sample than is worth sending."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        outputs = self(x)
        self.log("of a weight", (outputs @ self.last.weight).softmax(0).std())
        self.log("of much", (outputs @ self.last.weight.repeat(1, 2000)).std())
        self.log("of outputs", outputs.repeat(1, 2000).std())
        return F.cross_entropy(outputs, y)


def test_what_needs_a_weight_after_samples_meet_or_much_of_every_sample_is_named() -> None:
    trainer = make_trainer(dapple(layout="1", microbatches=2), max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Large(), loader())
    (told,) = [str(one.message) for one in caught if "do not make together" in str(one.message)]
    lines = Path(__file__).read_text().splitlines()
    (place,) = [number for number, line in enumerate(lines, start=1) if line.strip().startswith('self.log("of much"')]
    assert f"test_made_of_all_samples.py:{place} in" in told and told.count("test_made_of_all_samples.py:") == 1
