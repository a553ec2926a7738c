"""Results of torchmetrics objects, taken apart and computed with, are logged and returned as those of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics

from ranks.world import World
from strategy.small import LAYOUTS, Small, assert_as_on_one_device, loader, run

COMMON: dict[str, Any] = {"task": "multiclass", "num_classes": 3}


def metrics() -> torchmetrics.MetricCollection:
    accuracy, f1 = torchmetrics.Accuracy(**COMMON), torchmetrics.F1Score(average="macro", **COMMON)
    return torchmetrics.MetricCollection({"acc": accuracy, "f1": f1}, prefix="train/")


def prefixed(net: Net, found: Any) -> None:
    net.log_dict({f"all/{name}": value for name, value in found.items()})


def one_by_one(net: Net, found: Any) -> None:
    for name, value in found.items():
        net.log(name, value, prog_bar=True)


def as_it_is(net: Net, found: Any) -> None:
    net.log_dict(found)
    net.log("again", found["train/acc"])


def changed(net: Net, found: Any) -> None:
    found["both"] = (found.pop("train/f1") + found["train/acc"]) / 2
    net.log_dict(found)


def tensors(net: Net, found: Any) -> None:
    for name, value in {**found, "none": 3}.items():
        if isinstance(value, torch.Tensor) and torch.is_tensor(value):
            net.log(name, value)
    net.log("number", number if isinstance(number := found["train/acc"].item(), float) else -1)


def computed(net: Net, found: Any) -> None:
    accuracy = found["train/acc"]
    net.log("error", 1 - accuracy)
    net.log("percent", 100 * accuracy.detach().item())
    net.log("mean", torch.stack([accuracy, found["train/f1"]]).mean())
    net.log("rounded", round(accuracy.item(), 2) // 0.1)
    print(accuracy, f"{accuracy:.3f}")  # noqa: T201  # as steps do


WAYS: dict[str, Callable[[Net, Any], None]] = {
    way.__name__: way for way in (prefixed, one_by_one, as_it_is, changed, computed, tensors)
}


class Net(Small):
    """Says in a way what a collection, a metric per class and one with entries of its own give."""

    data = staticmethod(lambda: loader(18, 4))
    validation = staticmethod(lambda: loader(12, 4, 2))

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.metrics, self.compute = WAYS[way], metrics(), way == "prefixed"
        self.recall = torchmetrics.Recall(average=None, **COMMON)
        self.kept: list[dict[str, Any]] = []
        self.by_name = torchmetrics.ClasswiseWrapper(torchmetrics.Precision(average=None, **COMMON))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        self.way(self, self.metrics(outputs, batch[1]))
        recall = self.recall(outputs, batch[1])
        self.log("recall/0", recall[0])
        self.log_dict({f"of/{i}": value for i, value in enumerate(recall)} if len(recall) == 3 else {})
        for name, value in zip(("cat", "dog", "eel"), recall, strict=True):
            self.log(name, value)
        self.log("recall", recall.mean())
        self.log("right", len(batch[1]) * recall.mean())
        self.log("mixed", 0.5 * recall.mean() + 0.5 * (1 - outputs.detach().mean()))
        self.log("weighed", recall.mean() * batch[1].size(0) / (1 + self.current_epoch))
        self.log("precision/1", self.by_name(outputs, batch[1])["multiclassprecision_1"])
        self.kept.append({"recall": recall.mean().item(), **self.metrics(outputs, batch[1])})
        return {"loss": F.cross_entropy(outputs, batch[1]), "error": 1 - recall.mean()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metrics.update(self(batch[0]), batch[1])
        if self.compute:
            self.log_dict({f"val/{name}": value for name, value in self.metrics.compute().items()})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.noted.append((float(outputs["error"]), {name: float(value) for name, value in self.kept[-1].items()}))


def fitted(way: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    return run(lambda: Net(way), options)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("way", WAYS)
def test_entries_and_what_is_made_of_them_are_those_of_the_batch(way: str, options: dict[str, Any]) -> None:
    """Such steps were refused: `self.log_dict({f"train/{k}": v for k, v in self.metrics(...).items()})`."""
    assert_as_on_one_device(fitted, way, options)


class Decides(Small):
    """Uses a metric where its value is asked for at once."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.accuracy = use, torchmetrics.Accuracy(**COMMON)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        accuracy, loss = self.accuracy(outputs, batch[1]), F.cross_entropy(outputs, batch[1])
        if self.use == "branch" and 1 - accuracy > 0.5:
            self.log("bad", 1.0)
        elif self.use == "text":
            self.note = f"{accuracy:.3f}"
        elif self.use == "number":
            self.note = float(accuracy)
        elif (self.use == "equal" and accuracy == 1) or (self.use == "unlike" and accuracy != 1):
            self.log("perfect", 1.0)
        elif self.use == "form" and accuracy.numel() == 1:
            self.log("one", accuracy)
        elif self.use == "in place":
            accuracy.mul_(2)
        elif self.use == "into another":
            torch.ones(()).add_(accuracy)
        elif self.use == "copy":
            self.log("copied", torch.tensor(accuracy))
        return loss * (1 + accuracy) if self.use == "loss" else loss


def refused(use: str, options: dict[str, Any]) -> str:
    """Return the error of a fit; a worker function."""
    with pytest.raises(Exception, match=r"is used by the step|made a text, which leaves") as error:
        run(lambda: Decides(use), options)
    assert "report this as a bug" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "use", ["branch", "text", "number", "loss", "equal", "unlike", "form", "in place", "into another", "copy"]
)
def test_a_step_that_goes_by_the_value_of_a_metric_is_refused(use: str) -> None:
    for said in World(2).run(refused, use, LAYOUTS[0]):
        assert use == "text" or "the value of a torchmetrics object is used by the step" in said
        assert use == "text" or "test_metric_entries.py" in said
        assert use != "copy" or "what torch.tensor made of the result of a metric" in said


class Unknown(Small):
    """A collection one of whose metrics has entries of other names, which are known when it has run."""

    def __init__(self) -> None:
        super().__init__()
        recall = torchmetrics.ClasswiseWrapper(torchmetrics.Recall(average=None, **COMMON))
        self.metrics = torchmetrics.MetricCollection({"acc": torchmetrics.Accuracy(**COMMON), "recall": recall})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        found = self.metrics(outputs, batch[1])
        self.log_dict({f"train/{name}": value for name, value in found.items()})
        return F.cross_entropy(outputs, batch[1])


def unknown(options: dict[str, Any]) -> str:
    with pytest.raises(Exception, match="Give the result as it is") as error:
        run(Unknown, options)
    return str(error.value)


def test_entries_of_other_names_than_the_metrics_are_told() -> None:
    for said in World(2).run(unknown, LAYOUTS[0]):
        assert "'recall'" in said
        assert "multiclassrecall_0" in said
