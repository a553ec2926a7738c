"""What a step says with an item, a row or a text for every sample is that of the batch, whatever it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch.utils.data import DataLoader

from ranks.world import World
from strategy.small import LAYOUTS, Named, Small, assert_as_on_one_device, loader, run, samples

SAID = {
    "array": lambda o, batch: o.detach().numpy(),
    "array of numbers": lambda o, batch: {"best": o.argmax(1).numpy(), "scores": o.detach().softmax(1).numpy()},
    "number of an array": lambda o, batch: o.detach().numpy().mean(),
    "list": lambda o, batch: o.argmax(1).tolist(),
    "rows": lambda o, batch: [row.detach() for row in o],
    "texts": lambda o, batch: ["abc"[i] for i in o.argmax(1)],
    "pairs": lambda o, batch: list(zip(batch["name"], o.detach(), strict=True)),
    "records": lambda o, batch: [{"name": n, "best": int(i)} for n, i in zip(batch["name"], o.argmax(1), strict=True)],
    "by name": lambda o, batch: dict(zip(batch["name"], o.argmax(1).tolist(), strict=True)),
    "text of the batch": lambda o, batch: f"{float(o.mean()):.6f}",
    "ends of an array": lambda o, batch: (o[0].detach().numpy(), o[-1].detach().numpy()),
}


LAST = {"layout": "1-2", "microbatches": 2}  # ranks of the last stage share the samples


class Says(Small):
    """One of them returned by a training step, and by that of a prediction."""

    data = staticmethod(lambda: DataLoader(Named(16, raw=True), 8))

    def __init__(self, said: str) -> None:
        super().__init__()
        self.say = SAID[said]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch["x"])
        return {"loss": F.cross_entropy(outputs, batch["y"]), "said": self.say(outputs, batch)}

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.say(self(batch["x"]), batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append(outputs["said"])

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append(outputs)


def said(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit or predict; a worker function."""
    function, what = name.split(": ")
    return run(lambda: Says(what), options and {**options, "check": True}, function=function)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", [*LAYOUTS, LAST], ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("what", SAID)
@pytest.mark.parametrize("function", ["fit", "predict"])
def test_what_is_said_of_every_sample_is_that_of_the_batch(function: str, what: str, options: dict[str, Any]) -> None:
    """It was that of the first micro-batch, or items of several had become their mean."""
    assert_as_on_one_device(said, f"{function}: {what}", options)


class Sometimes(Small):
    """What is said in some batches alone, and was not when the step was tried."""

    data = staticmethod(lambda: loader(24, 8))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        if float(outputs.sum()) > 1e9:
            raise ValueError("which makes it a step that is replayed")
        loss = F.cross_entropy(outputs, batch[1])
        if batch_idx == 1:
            self.log("count", (batch[1] > 0).sum().float())
            return {"loss": loss, "last": outputs[-1].detach(), "rows": list(outputs.detach())}
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.noted.append([outputs["last"], outputs["rows"], self.trainer.callback_metrics["count"]])


class Weighted(Small):
    """Weights of samples in a list of numbers, which no tensor of a micro-batch has as many samples as."""

    @staticmethod
    def data() -> Any:
        weights = ([float(i) for i in range(k, k + 8)] for k in (1, 2))
        return DataLoader([{"x": samples(8).tensors[0], "weights": own} for own in weights], batch_size=None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self(batch["x"])[:, 0] * torch.tensor(batch["weights"], dtype=torch.float64)).square().mean()


class Words(Small):
    """Metrics that are given texts, and arrays."""

    data = staticmethod(lambda: DataLoader(Named(16, raw=True), 8))

    def __init__(self) -> None:
        super().__init__()
        self.wer, self.mean = torchmetrics.text.WordErrorRate(), torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch["x"])
        found = [f"word {int(i)}" for i in outputs.argmax(1)]
        self.wer.update(found, [f"word {int(i)}" for i in batch["y"]])
        self.mean.update(outputs.detach().abs().amax(1).tolist())
        return F.cross_entropy(outputs, batch["y"])

    def on_train_epoch_end(self) -> None:
        self.noted.append([float(self.wer.compute()), float(self.wer.total), float(self.mean.compute())])


class Elsewhere(Small):
    """Metrics that are no sub-modules, made when a hook needs them; a buffer that validation changes."""

    validation = staticmethod(lambda: loader(12, 6, seed=2))

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        self.seen += F.one_hot(outputs.argmax(1), 3).sum(0)
        return outputs

    def on_validation_epoch_start(self) -> None:
        self.sums = {"sum": torchmetrics.SumMetric()}

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.sums["sum"].update(outputs.sum())

    def on_validation_epoch_end(self) -> None:
        self.noted.append([float(self.sums["sum"].compute()), self.seen.clone()])


KINDS = {cls.__name__: cls for cls in (Sometimes, Weighted, Words, Elsewhere)}


def fitted(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    return run(KINDS[name], options and {**options, "check": True})


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", LAYOUTS[:2], ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("name", KINDS)
def test_it_trains_as_on_one_device(name: str, options: dict[str, Any]) -> None:
    """Metrics were summed over ranks, or counted a part of the samples; buffers stayed what they were."""
    assert_as_on_one_device(fitted, name, options)


class Config(Small):
    """A number that a logger's experiment has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = self.logger.experiment.config.scale if self.logger else 1.0
        return self.loss(batch) * scale


def refused(name: str, options: dict[str, Any]) -> str:
    """Return the error of a fit; a worker function."""
    from strategy.test_loggers_in_steps import Noting

    with pytest.raises(Exception) as error:  # noqa: PT011
        run({"Config": Config}[name], options, logger=Noting())
    return str(error.value)


@pytest.mark.parametrize(("name", "text"), [("Config", "experiment.config.scale")])
def test_what_cannot_be_known_is_refused(name: str, text: str) -> None:
    """A stand-in for a number was true, and entered the loss."""
    assert all(text in said for said in World(2).run(refused, name, LAYOUTS[0]))
