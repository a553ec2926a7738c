"""Steps whose Python changes from batch to batch, each in its own way; `STEPS` names them."""

from __future__ import annotations

import math
import random
import types
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

BATCHES, EPOCHS, SAMPLES = 4, 3, 4
STEPS: dict[str, type[Net]] = {}


class Net(pl.LightningModule):
    """8-16-4; `KEPT` names what a step leaves on the module."""

    KEPT: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        STEPS[cls.__name__] = cls

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 4)

    @staticmethod
    def extra(number: int) -> dict[str, Any]:
        """Return what the batch of this number has besides inputs and classes."""
        return {}

    def out(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.two(torch.tanh(self.one(batch["x"])))

    def error(self, batch: dict[str, Any]) -> torch.Tensor:
        return F.cross_entropy(self.out(batch), batch["y"])

    def scaled(self, batch: dict[str, Any], scale: Any) -> torch.Tensor:
        return self.error(batch) * (1 + scale)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches(step: type[Net]) -> list[dict[str, Any]]:
    """Return the batches of one epoch."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64),
            "y": torch.randint(0, 4, (SAMPLES,), generator=generator),
            **step.extra(number),
        }
        for number in range(BATCHES)
    ]


# ------------------------------------------------------------------------------------------------ counters


class LateStep(Net):
    def training_step(self, batch, batch_idx):
        return self.scaled(batch, 1.0 if self.global_step >= 7 else 0.0)


class LateEpoch(Net):
    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        return loss + self.out(batch).pow(2).mean() if self.current_epoch == 2 else loss


class EveryThirdBatch(Net):
    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        if batch_idx % 3 == 2:
            self.log("third", loss)
            loss = loss + self.out(batch).pow(2).mean()
        return loss


class WarmUp(Net):
    def training_step(self, batch, batch_idx):
        weight = min(1.0, max(0.0, (self.global_step - 3) / 4))
        self.log("weight", weight)
        return self.error(batch) + weight * self.out(batch).pow(2).mean()


class Cosine(Net):
    def training_step(self, batch, batch_idx):
        return self.scaled(batch, 0.5 * (1 + math.cos(math.pi * self.global_step / 12)))


class Exponent(Net):
    def training_step(self, batch, batch_idx):
        return self.scaled(batch, 0.9**self.global_step + 0.1 * np.sqrt(batch_idx + 1.0))


class Temperature(Net):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.out(batch) / max(0.5, 2.0 - self.current_epoch), batch["y"])


class LayerByStep(Net):
    def training_step(self, batch, batch_idx):
        activation = [torch.tanh, torch.relu, torch.sigmoid][self.current_epoch]
        return F.cross_entropy(self.two(activation(self.one(batch["x"]))), batch["y"])


class LastBatch(Net):
    def training_step(self, batch, batch_idx):
        return self.scaled(batch, 1.0 if self.trainer.is_last_batch else 0.0)


# ------------------------------------------------------------------------------------------------ changed by hooks


class HyperParameter(Net):
    def __init__(self, alpha: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_train_epoch_start(self):
        self.hparams.alpha = 0.5 * self.current_epoch

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, self.hparams.alpha)


class Attribute(Net):
    scale = 0.0

    def on_train_batch_start(self, batch, batch_idx):
        self.scale = 0.1 * batch_idx

    def training_step(self, batch, batch_idx):
        self.log("scale", self.scale)
        return self.scaled(batch, self.scale)


class ListItem(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [1.0, 0.0]

    def on_train_epoch_start(self):
        self.weights[1] = float(self.current_epoch)

    def training_step(self, batch, batch_idx):
        return self.weights[0] * self.error(batch) + self.weights[1] * self.out(batch).pow(2).mean()


class DictOfDicts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"loss": {"weight": 0.0}}

    def on_train_batch_end(self, *_):
        self.config["loss"]["weight"] += 0.05

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, self.config["loss"]["weight"])


@dataclass
class Options:
    scale: float = 0.0
    names: list[str] = field(default_factory=list)


class DataClass(Net):
    def __init__(self) -> None:
        super().__init__()
        self.options = Options()

    def on_train_epoch_end(self):
        self.options.scale += 0.5
        self.options.names.append("more")

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, self.options.scale * len(self.options.names))


class Config:
    scale = 0.0

    class nested:
        scale = 0.0
        other = 0.0


class ClassAsConfig(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config, Config.scale = Config, 0.0

    def on_train_epoch_end(self):
        Config.scale += 0.5

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, self.config.scale)


class ClassAttributeOfAHelper(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config, Config.scale = Config(), 0.0

    def on_train_epoch_end(self):
        Config.scale += 0.5

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, self.config.scale)


class NestedClassAsConfig(Net):
    def __init__(self) -> None:
        super().__init__()
        Config.nested.scale = 0.0

    def on_train_epoch_end(self):
        Config.nested.scale += 0.5

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, Config.nested.scale)


def _first_level() -> float:
    return Config.nested.scale


def _second_level() -> float:
    return Config.nested.other


class TwoFunctionsReadAClass(Net):
    def __init__(self) -> None:
        super().__init__()
        Config.nested.scale = Config.nested.other = 0.0

    def on_train_epoch_end(self):
        Config.nested.other += 0.5

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, _first_level() + _second_level())


class OwnClassAttribute(Net):
    level = 0.0

    def __init__(self) -> None:
        super().__init__()
        type(self).level = 0.0

    def on_train_epoch_end(self):
        type(self).level += 0.5

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, type(self).level)


class Property(Net):
    def __init__(self) -> None:
        super().__init__()
        self._state = [0]

    @property
    def level(self) -> float:
        return 0.1 * self._state[0]

    def on_train_batch_end(self, *_):
        self._state[0] += 1

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, self.level)


def _closed_over() -> tuple[Any, Any]:
    level = 0.0

    def get() -> float:
        return level

    def put(value: float) -> None:
        nonlocal level
        level = value

    return get, put


class Closure(Net):
    def __init__(self) -> None:
        super().__init__()
        self.get, self.put = _closed_over()

    def on_train_epoch_end(self):
        self.put(self.get() + 0.5)

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, self.get())


GLOBAL, TABLE = 0.0, {"scale": 0.0}


class Globals(Net):
    def __init__(self) -> None:
        global GLOBAL
        super().__init__()
        GLOBAL = TABLE["scale"] = 0.0

    def on_train_epoch_end(self):
        global GLOBAL
        GLOBAL += 0.3
        TABLE["scale"] += 0.2

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, GLOBAL + TABLE["scale"])


class SubModuleReplaced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.Tanh()

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.activation = nn.ReLU()

    def out(self, batch):
        return self.two(self.activation(self.one(batch["x"])))

    def training_step(self, batch, batch_idx):
        return self.error(batch)


class ModeChanged(Net):
    def __init__(self) -> None:
        super().__init__()
        self.flag = nn.Identity()

    def on_train_epoch_start(self):
        self.flag.train(self.current_epoch != 1)

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, 0.0 if self.flag.training else 1.0)


class Unfrozen(Net):
    def on_train_epoch_start(self):
        self.one.requires_grad_(self.current_epoch >= 1)

    def training_step(self, batch, batch_idx):
        return self.error(batch)


class TensorInPlace(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.zeros(4, dtype=torch.float64)

    def on_train_batch_end(self, *_):
        self.weight.add_(0.1)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.out(batch) * (1 + self.weight), batch["y"])


class TensorReplaced(TensorInPlace):
    def on_train_batch_end(self, *_):
        self.weight = self.weight + 0.1


class BufferByHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros((), dtype=torch.float64))

    def on_train_batch_start(self, batch, batch_idx):
        self.level.fill_(0.1 * batch_idx)

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, self.level)


class ArrayByHook(Net):
    def __init__(self) -> None:
        super().__init__()
        self.levels = np.zeros(3)

    def on_train_epoch_end(self):
        self.levels[1] += 0.5

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, float(self.levels.sum()))


class MethodReplaced(Net):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.error = lambda batch: F.mse_loss(self.out(batch), torch.ones_like(self.out(batch)))

    def training_step(self, batch, batch_idx):
        return self.error(batch)


class AttributeAppears(Net):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.boost = 1.0

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, getattr(self, "boost", 0.0))


class FrozenByStep(Net):
    def training_step(self, batch, batch_idx):
        self.one.requires_grad_(batch_idx % 2 == 1)
        return self.error(batch)


# ------------------------------------------------------------------------------------------------ read in the backward


class Scaled(torch.autograd.Function):
    factor = 1.0

    @staticmethod
    def forward(ctx, x, box):
        ctx.box = box
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Scaled.factor * ctx.box["scale"], None


class ReadInBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.box, Scaled.factor = {"scale": 1.0}, 1.0

    def on_train_epoch_end(self):
        Scaled.factor += 0.5
        self.box["scale"] += 0.5

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.two(Scaled.apply(self.one(batch["x"]), self.box)), batch["y"])


class ReadInHook(Net):
    scale = 1.0

    def on_train_epoch_end(self):
        self.scale += 0.5

    def training_step(self, batch, batch_idx):
        hidden = self.one(batch["x"])
        hidden.register_hook(lambda gradient: gradient * self.scale * (1 + self.global_step / 10))
        return F.cross_entropy(self.two(hidden), batch["y"])


class ReadsGradient(Net):
    def training_step(self, batch, batch_idx):
        return self.scaled(batch, 0.0 if self.one.weight.grad is None else 1.0)


class ReadsMomentum(Net):
    def training_step(self, batch, batch_idx):
        return self.scaled(batch, 1.0 if self.one.weight in self.optimizers().state else 0.0)


# ------------------------------------------------------------------------------------------------ changed by the step


class PythonRandom(Net):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(5)

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, 1.0 if self.random.random() < 0.4 else 0.0)


class NumpyRandom(Net):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(5)

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, self.random.uniform())


class TorchRandom(Net):
    def __init__(self) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(5)

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, torch.rand((), generator=self.random))


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> float:
        self.n += 1
        return 0.0 if self.n <= 6 else 0.5


class CountsAtBothEnds(Net):
    def __init__(self) -> None:
        super().__init__()
        self.counter = Counter()

    def training_step(self, batch, batch_idx):
        first = self.counter()
        return F.cross_entropy(self.out({"x": batch["x"] * (1 + first)}) * (1 + self.counter()), batch["y"])


class CountsCalls(Net):
    KEPT = ("calls",)

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return self.scaled(batch, 0.1 * self.calls)


class RunningMean(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16, dtype=torch.float64))

    def training_step(self, batch, batch_idx):
        self.mean = 0.9 * self.mean + 0.1
        return F.cross_entropy(self.two(self.one(batch["x"]) - self.mean), batch["y"])


class ClassAttributeByStep(Net):
    level = 0.0

    def __init__(self) -> None:
        super().__init__()
        type(self).level = 0.0

    def training_step(self, batch, batch_idx):
        loss = self.scaled(batch, self.level)
        type(self).level = 0.5
        return loss


class RateByStep(Net):
    def training_step(self, batch, batch_idx):
        group = self.optimizers().param_groups[0]
        loss = self.scaled(batch, group["lr"])
        group["lr"] = 0.05
        return loss


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

    def forward(self, x, number):
        return self.each[number](x)


class OneOfTheExperts(Net):
    """The other one gets no gradient, so its momentum and decay rest."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    @staticmethod
    def extra(number):
        return {"expert": number % 2}

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.two(self.experts(self.one(batch["x"]), batch["expert"])), batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)


class Iterates(Net):
    def __init__(self) -> None:
        super().__init__()
        self.levels = iter([0.0] * 6 + [1.0] * 6)

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, next(self.levels))


class DefaultArgument(Net):
    def training_step(self, batch, batch_idx, seen=[]):  # noqa: B006
        seen.append(batch_idx)
        return self.scaled(batch, 1.0 if len(seen) > 7 else 0.0)


# ------------------------------------------------------------------------------------------------ in the batch


class NumberInBatch(Net):
    @staticmethod
    def extra(number):
        return {"scale": 0.25 * number, "count": number}

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, batch["scale"] * batch["count"])


class ArrayInBatch(Net):
    @staticmethod
    def extra(number):
        return {"scale": np.array(0.5 * number)}

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, float(batch["scale"].sum()))


class ObjectInBatch(Net):
    @staticmethod
    def extra(number):
        return {"meta": types.SimpleNamespace(scale=0.5 * number)}

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, batch["meta"].scale)


class NoneInBatch(Net):
    @staticmethod
    def extra(number):
        return {"weight": None if number % 2 else torch.full((SAMPLES,), 0.5, dtype=torch.float64)}

    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        return loss if batch["weight"] is None else loss + (self.out(batch).pow(2).mean(1) * batch["weight"]).mean()


class KeysThatComeAndGo(Net):
    @staticmethod
    def extra(number):
        side = torch.full((SAMPLES, 16), 0.5, dtype=torch.float64)
        return ({}, {"side": side}, {"side": None, "has_side": False}, {"side": side, "has_side": True})[number]

    def training_step(self, batch, batch_idx):
        hidden = self.one(batch["x"])
        if batch.get("side") is not None:
            hidden = hidden + (2.0 if batch.get("has_side") else 1.0) * batch["side"]
        return F.cross_entropy(self.two(torch.tanh(hidden)), batch["y"])


class TextInBatch(Net):
    @staticmethod
    def extra(number):
        return {"kind": "hard" if number == 2 else "easy"}

    def training_step(self, batch, batch_idx):
        return self.scaled(batch, {"easy": 0.0, "hard": 1.0}[batch["kind"]])


# ------------------------------------------------------------------------------------------------ of the trainer


class CallbackMetrics(Net):
    def training_step(self, batch, batch_idx):
        last = self.trainer.callback_metrics.get("loss", 0.0)
        loss = self.error(batch)
        self.log("loss", loss)
        return loss + 0.1 * float(last) * self.out(batch).pow(2).mean()


class Schedulers(Net):
    def training_step(self, batch, batch_idx):
        return self.scaled(batch, 10 * self.lr_schedulers().get_last_lr()[0])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Momentum(Net):
    def on_train_batch_start(self, batch, batch_idx):
        self.optimizers().param_groups[0]["momentum"] = 0.5 + 0.1 * batch_idx

    def training_step(self, batch, batch_idx):
        group = self.optimizers().param_groups[0]
        self.log("rate", group["lr"])
        return self.scaled(batch, group["momentum"])


class SkippedBatch(Net):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 2 else self.error(batch)


class SkippedWhereNotANumber(Net):
    @staticmethod
    def extra(number):
        return {"noise": torch.full((SAMPLES, 4), math.nan if number == 2 else 0.0, dtype=torch.float64)}

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.out(batch) + batch["noise"], batch["y"])
        return None if torch.isnan(loss) else loss


class SkippedWhereNotANumberAndCounted(SkippedWhereNotANumber):
    KEPT = ("skipped",)
    skipped = 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss is None:
            self.skipped += 1
        return loss


# ------------------------------------------------------------------------------------------------ left on the module


class FillsByHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {}
        for name, module in self.named_children():
            module.register_forward_hook(lambda module, given, out, name=name: self.seen.update({name: out}))

    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        self.log("zeros", sum((seen < 0).double().mean() for seen in self.seen.values()))
        return loss + 0.1 * sum(seen.square().mean() for seen in self.seen.values()) / len(self.seen)


class ClearedAndFilled(FillsByHooks):
    KEPT = ("names",)

    def training_step(self, batch, batch_idx):
        self.seen.clear()
        loss = super().training_step(batch, batch_idx)
        self.names = [*self.seen]
        if batch_idx % 2:
            self.seen.clear()
        return loss


class FilledByOthers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scales = {}

    def on_train_epoch_end(self):
        self.scales["epoch"] = 0.25 * self.current_epoch

    def training_step(self, batch, batch_idx):
        self.scales["half"] = 0.5
        return self.scaled(batch, sum(self.scales.values()))


class Collects(Net):
    KEPT = ("losses", "last", "by_index", "counts", "seen")
    seen: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.by_index, self.counts = [], {}, []
        type(self).seen.clear()

    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        self.losses.append(loss.detach())
        self.last = loss.detach()
        self.by_index[f"batch {batch_idx}"] = loss.item()
        self.counts.append(batch_idx + 10 * self.current_epoch)
        self.seen.append(self.global_step)
        return loss


class CollectsByValue(Net):
    """A dict by what a tensor says: its keys were stand-ins, and the graph was used for a batch."""

    KEPT = ("seen",)

    def __init__(self) -> None:
        super().__init__()
        self.seen = {}

    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        for kind in batch["y"].tolist():
            self.seen[kind] = loss.item()
        return loss


class CollectsTexts(Net):
    """Texts of values said "nan"."""

    KEPT = ("texts",)

    def __init__(self) -> None:
        super().__init__()
        self.texts = []

    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        self.texts.append(f"{loss.item():.3f} and {loss.detach():.2f}")
        return loss


class LogsByText(Net):
    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        self.log(f"loss of class {batch['y'][0].item()}", loss.detach())
        return loss


class CollectsInValidation(Net):
    KEPT = ("outputs", "means")

    def __init__(self) -> None:
        super().__init__()
        self.outputs, self.means = [], []

    def training_step(self, batch, batch_idx):
        return self.error(batch)

    def validation_step(self, batch, batch_idx):
        self.outputs.append({"loss": self.error(batch), "index": batch_idx})

    def on_validation_epoch_end(self):
        self.means.append(float(torch.stack([o["loss"] for o in self.outputs]).mean()))
        self.log("mean", self.means[-1] + len(self.outputs))
        self.outputs.clear()


class CollectsPerEpoch(Net):
    KEPT = ("epochs",)

    def __init__(self) -> None:
        super().__init__()
        self.losses, self.epochs = [], []

    def training_step(self, batch, batch_idx):
        loss = self.error(batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.epochs.append(float(torch.stack(self.losses).mean()))
        self.losses.clear()
