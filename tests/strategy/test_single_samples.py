"""Single samples that a step keeps, returns or logs are those of the batch, not a mean over micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from strategy.small import LAYOUTS, Small, assert_as_on_one_device, loader, run

PICKED = {
    "first two": lambda outputs: outputs[:2],
    "first": lambda outputs: outputs[0],
    "second": lambda outputs: outputs[1],
    "last": lambda outputs: outputs[-1],
    "last two": lambda outputs: outputs[-2:],
    "one number": lambda outputs: outputs[0, 1].exp(),
}


class Net(Small):
    """One way to say what was picked, in every step."""

    data = staticmethod(lambda: loader(16, 8))

    def __init__(self, way: str, picked: str) -> None:
        super().__init__()
        self.way, self.pick = way, PICKED[picked]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        loss, picked = F.cross_entropy(outputs, batch[1]), self.pick(outputs).detach()
        if self.way == "kept":
            self.example = picked
        elif self.way == "logged":
            self.log("example", picked.sum())
        return {"loss": loss, "example": picked} if self.way == "returned" else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.way == "returned":
            self.noted.append(outputs["example"].clone())
        elif self.way == "kept":
            self.noted.append(self.example.clone())


def fitted(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    return run(lambda: Net(*name.split(": ")), options and {**options, "check": True})


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("picked", PICKED)
@pytest.mark.parametrize("way", ["kept", "returned", "logged"])
def test_picked_samples_are_those_of_the_batch(way: str, picked: str, options: dict[str, Any]) -> None:
    """They had become a mean over micro-batches; where a step keeps them, without a word."""
    assert_as_on_one_device(fitted, f"{way}: {picked}", options)


class Longer(Small):
    """More samples than a micro-batch has, which the operations of a micro-batch do not show."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        self.example = outputs[:3].detach()
        return F.cross_entropy(outputs, batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append(self.example.clone())


class LastIsSmaller(Small):
    """More samples than a slice of the last batch has, which is smaller."""

    data = staticmethod(lambda: loader(22, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        return {"loss": F.cross_entropy(outputs, batch[1]), "example": outputs[:4].detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append(outputs["example"].clone())


class EverySecond(Small):
    """Of a micro-batch of two samples, every second one is the first one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        self.log("sum", outputs[::2].sum())
        return F.cross_entropy(outputs, batch[1])


def every_second(_: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit it; a worker function."""
    return run(EverySecond, options)


def test_every_second_sample_is_one_of_the_batch() -> None:
    """It was logged as that of the first sample, without a word."""
    assert_as_on_one_device(every_second, "", {"layout": "1-1", "microbatches": 2, "capture": "joint"})


class ValidatesFirstTwo(Small):
    """What replicas with a sample each cannot put together."""

    validation = staticmethod(lambda: loader(12, 4))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).t()[:, :2]

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append(outputs.clone())


class LastThree(Small):
    """More than slices of two samples have: a graph of two says that they are all."""

    data = staticmethod(lambda: loader(16, 8))
    validation = staticmethod(lambda: loader(13, 8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        return {"loss": F.cross_entropy(outputs, batch[1]), "example": outputs[-3:].detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])[-3:]

    on_train_batch_end, on_validation_batch_end = (
        LastIsSmaller.on_train_batch_end,
        ValidatesFirstTwo.on_validation_batch_end,
    )


OTHERS = {one.__name__: one for one in (Longer, LastIsSmaller, ValidatesFirstTwo, LastThree)}


def fitted_others(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    return run(OTHERS[name], options and {**options, "check": True})


@pytest.mark.parametrize("layout", ["1-1", "2"])
@pytest.mark.parametrize("name", OTHERS)
def test_picked_samples_of_which_a_slice_has_too_few_are_those_of_the_batch(name: str, layout: str) -> None:
    """They were all samples in the place of three, or an error in the middle of a run."""
    assert_as_on_one_device(fitted_others, name, {"layout": layout, "microbatches": 2, "capture": "joint"})
