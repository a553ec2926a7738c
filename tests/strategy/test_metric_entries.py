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


class SumOfErrors(torchmetrics.Metric):
    """A metric that torchmetrics computes from its whole state (full_state_update), and has a gradient."""

    full_state_update = True
    is_differentiable = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("errors", default=[], dist_reduce_fx="cat")

    def update(self, outputs: torch.Tensor, y: torch.Tensor) -> None:
        self.errors.append((outputs[:, 0] - y).square())

    def compute(self) -> torch.Tensor:
        return torchmetrics.utilities.dim_zero_cat(self.errors).mean()


class Quick(torchmetrics.Metric):
    """A metric with a forward that is not torchmetrics', and a metric of its own in a list."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.parts = [SumOfErrors(), SumOfErrors()]

    def forward(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.parts[0](outputs, y) + 0.5 * self.parts[1](outputs, 2 - y)

    def update(self, outputs: torch.Tensor, y: torch.Tensor) -> None:
        self.forward(outputs, y)

    def compute(self) -> torch.Tensor:
        return sum(part.compute() for part in self.parts)

    def reset(self) -> None:
        for part in self.parts:
            part.reset()


class Uses(Small):
    """Uses values of metrics at once, in one of several ways, and logs what they have accumulated."""

    validation = staticmethod(lambda: loader(12, 4, 2))

    def __init__(self, use: str) -> None:
        super().__init__()
        checks = {"validate_args": use != "unchecked"}
        self.use, self.accuracy = use, torchmetrics.Accuracy(**COMMON, **checks)
        self.all_errors, self.more_errors = SumOfErrors(), SumOfErrors()
        self.both, self.quick, self.many = self.all_errors + 2 * self.more_errors, Quick(), metrics()
        self.loose = [SumOfErrors()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        return getattr(self, self.use.replace(" ", "_"))(outputs, batch[1], loss)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        error = self.all_errors(outputs, batch[1])
        if error.device.type != "mps" and self.accuracy(outputs, batch[1]) >= 0.25:
            self.log("val/error", error)
        self.log("val/accuracy", self.accuracy)

    def branch(self, outputs: Any, y: Any, loss: Any) -> Any:
        if 1 - self.accuracy(outputs, y) > 0.5:
            self.noted.append("bad")
            loss = 2 * loss
        return loss

    unchecked = branch

    def text(self, outputs: Any, y: Any, loss: Any) -> Any:
        self.noted.append(f"{self.accuracy(outputs, y):.3f}")
        return loss

    def number(self, outputs: Any, y: Any, loss: Any) -> Any:
        self.noted.append(float(self.accuracy(outputs, y)))
        return loss * (1 + self.accuracy(outputs, y).item())

    def factor(self, outputs: Any, y: Any, loss: Any) -> Any:
        loss = loss * (1 + self.accuracy(outputs, y)) + 0.1 * outputs.square().mean()
        self.log("factored", loss, on_epoch=True)
        return loss

    def equal(self, outputs: Any, y: Any, loss: Any) -> Any:
        accuracy = self.accuracy(outputs, y)
        return loss if accuracy != 1 and accuracy != 0 else 3 * loss

    def form(self, outputs: Any, y: Any, loss: Any) -> Any:
        accuracy = self.accuracy(outputs, y)
        return loss * accuracy.numel() * (2 if accuracy.shape == () else 3)

    def in_place(self, outputs: Any, y: Any, loss: Any) -> Any:
        accuracy = self.accuracy(outputs, y)
        accuracy.mul_(2)
        self.log("doubled", accuracy, on_epoch=True)
        return loss + torch.zeros((), dtype=torch.float64).add_(accuracy)

    def entries(self, outputs: Any, y: Any, loss: Any) -> Any:
        found = self.many(outputs, y)
        return loss * (2 - found["train/acc"] if found["train/f1"] > 0.3 else 1)

    def accumulated(self, outputs: Any, y: Any, loss: Any) -> Any:
        self.accuracy.update(outputs, y)
        return loss * (2 if self.accuracy.compute() > 0.4 else 1) * (1 + self.accuracy.compute())

    def accumulated_by_all(self, outputs: Any, y: Any, loss: Any) -> Any:
        self.many.update(outputs, y)
        return loss * (1 + self.many.compute()["train/acc"])

    def full_state(self, outputs: Any, y: Any, loss: Any) -> Any:
        value = self.all_errors(outputs, y)
        self.log("errors", self.all_errors, on_epoch=True)
        return loss + value

    def composed(self, outputs: Any, y: Any, loss: Any) -> Any:
        value = self.both(outputs, y) + (self.all_errors + self.more_errors)(outputs, y)
        self.log("composed", value, on_epoch=True)
        return value

    def by_itself(self, outputs: Any, y: Any, loss: Any) -> Any:
        value = self.quick(outputs, y)
        self.log("quick", value, on_epoch=True)
        return {"loss": value}

    def passing(self, outputs: Any, y: Any, loss: Any) -> Any:
        return SumOfErrors()(outputs, y) + loss

    def in_a_list(self, outputs: Any, y: Any, loss: Any) -> Any:
        value = self.loose[0](outputs, y)
        self.log("listed", value, on_epoch=True)
        return loss + value


WAYS_OF_USE = (
    "branch,unchecked,text,number,factor,equal,form,in place,entries,accumulated,accumulated by all,full state,"
    "composed,by itself,passing,in a list"
).split(",")


def used(use: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    return run(lambda: Uses(use), options)


ALONE = [{"layout": "1"}, {"layout": "2"}]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("options", LAYOUTS + ALONE, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("use", WAYS_OF_USE)
def test_a_step_may_use_the_value_of_a_metric(use: str, options: dict[str, Any]) -> None:
    """Such steps were refused."""
    assert_as_on_one_device(used, use, options)


class Copies(Small):
    """Gives a metric to a function that copies memory, which torch shows to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(**COMMON)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        self.log("copied", torch.tensor(self.accuracy(outputs, batch[1])))
        return F.cross_entropy(outputs, batch[1])


def refused(kind: type[Small], match: str, options: dict[str, Any]) -> str:
    """Return the error of a fit; a worker function."""
    with pytest.raises(Exception, match=match) as error:
        run(kind, options)
    assert "report this as a bug" not in str(error.value)
    return str(error.value)


def test_a_copy_that_torch_makes_of_a_result_is_refused() -> None:
    for said in World(2).run(refused, Copies, "what torch.tensor made of the result of a metric", LAYOUTS[0]):
        assert "test_metric_entries.py" in said


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


def test_entries_of_other_names_than_the_metrics_are_told() -> None:
    for said in World(2).run(refused, Unknown, "Give the result as it is", LAYOUTS[0]):
        assert "'recall'" in said
        assert "multiclassrecall_0" in said
