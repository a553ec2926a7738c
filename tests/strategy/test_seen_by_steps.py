"""A step sees what it sees on one device, while it is traced and after everything that it reads has changed."""

from __future__ import annotations

import copy
import json
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from ranks.world import World
from strategy.fits import dapple, make_trainer

BATCHES = 4


class Helper:
    """An object beside the module."""

    def __init__(self) -> None:
        self.scale, self.items = 1.0, [1.0]

    def level(self) -> float:
        return self.scale


class OtherHelper(Helper):
    """The class that a hook gives to the helper."""

    def level(self) -> float:
        return 3.0


class Block(nn.Linear):
    """A layer with an attribute of its class."""

    gain = 1.0


class OtherBlock(Block):
    """The class that a hook gives to the layer."""

    gain = 2.0


class UsersSGD(torch.optim.SGD):
    """An optimizer of the user's, with state of its own."""

    mode = "early"

    def level(self) -> float:
        return 2.0 if self.mode == "late" else 1.0


def with_default(level: float = 1.0) -> float:
    return level


def other_function(level: float = 1.0) -> float:
    return 5.0


class Net(pl.LightningModule):
    """Scale the loss by what is seen."""

    def __init__(self, see: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.last = Block(6, 12), nn.Linear(12, 1)
        self.see = see
        self.helper, self.settings, self.words, self.seen = Helper(), {"rate": 1.0, "sizes": [1]}, ["a"], []
        self.same_items, self.function = self.helper.items, with_default

    def on_train_start(self) -> None:
        scheduler = self.trainer.lr_scheduler_configs[0].scheduler
        self.beside = types.SimpleNamespace(optimizer=self.trainer.optimizers[0], scheduler=scheduler)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        number = self.see(self)
        self.log("number", number)
        return (self.last(self.first(batch).tanh()) - 1).square().mean() * number

    def configure_optimizers(self) -> Any:
        group = {"params": [*self.parameters()], "mode": "early", "names": {"all": ["a"]}}
        optimizer = UsersSGD([group], lr=0.05, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Changes(pl.Callback):
    """Change one thing before each batch from the third one on, and keep what the step logs."""

    def __init__(self, changes: tuple[Callable[[Any, Any], Any], ...]) -> None:
        self.changes, self.numbers = [None, None, *changes], []

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        number = len(self.numbers)
        if number < len(self.changes) and (change := self.changes[number]) is not None:
            change(module, trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.numbers.append(float(trainer.callback_metrics["number"]))


def trained(
    see: Callable[[Any], Any],
    changes: tuple[Callable[[Any, Any], Any], ...],
    options: dict[str, Any] | None,
    *,
    checkpoint: Path | None = None,
    **of_trainer: Any,
) -> list[float]:
    """Return what the step logs, batch by batch, and the sum of all weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Net(see).double()
    code, UsersSGD.mode, with_default.__defaults__ = with_default.__code__, "early", (1.0,)
    calls = Changes(changes)
    strategy = "auto" if options is None else dapple(cache="off", **options)
    data = [torch.randn(8, 6, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(BATCHES)]
    trainer = make_trainer(strategy, max_epochs=3, callbacks=[calls], **of_trainer)
    try:
        trainer.fit(module, DataLoader(data, batch_size=None), ckpt_path=checkpoint)
    finally:
        with_default.__code__ = code
    return [*calls.numbers, float(sum(weight.sum() for weight in module.state_dict().values()))]


def classes(step: Any) -> float:
    """Ask for classes, copies and identities; every answer is one binary digit."""
    trainer, group = step.trainer, step.trainer.optimizers[0].param_groups[0]
    step.seen.append(1.0)
    answers = [
        type(step) is Net and step.__class__ is Net and len(type(step).__mro__) == len(Net.__mro__),
        type(trainer) is pl.Trainer and trainer.__class__ is pl.Trainer,
        type(step.first) is Block and sum(type(part) is nn.Linear for part in step.modules()) == 1,
        type(step.settings) is dict and step.settings.__class__ is dict and isinstance(step.settings, dict),
        type(step.words) is list and isinstance(step.words, list) and type(step.seen) is list,
        type(step.global_step) is int and type(step.current_epoch) is int and isinstance(step.global_step, int),
        type(group) is dict and type(group["lr"]) is float,
        type(trainer.optimizers[0]) is UsersSGD and trainer.optimizers[0] is step.beside.optimizer,
        type(step.optimizers()).__name__ == "LightningUsersSGD"
        and step.optimizers().optimizer is trainer.optimizers[0],
        type(step.lr_schedulers()) is torch.optim.lr_scheduler.StepLR,
        type(step.logger) is CSVLogger and len(vars(step.beside)) == 2,
        step.same_items is step.helper.items,
        type(copy.copy(step.settings)) is dict and type(copy.deepcopy(step.words)) is list,
        pickle.loads(pickle.dumps(step.settings)) == json.loads(json.dumps(step.settings)),
        type(step.last.bias.sum().item()) is float and type(type(step)) is type(nn.Module),
        isinstance(Net, type) and issubclass(type(Net), type) and type("New", (Helper,), {})().level() == 1.0,
        "beside" in dir(step) and hasattr(step, "beside") and not hasattr(step, "absent"),
    ]
    return float(sum(2**place for place, answer in enumerate(answers) if answer))


def optimizers(step: Any) -> float:
    optimizer, group = step.trainer.optimizers[0], step.optimizers().param_groups[0]
    return (
        (1.0 if group["mode"] == "early" else 2.0)
        + (4.0 if group["names"]["all"] == ["a"] else 8.0)
        + 16.0 * optimizer.level()
        + 64.0 * len(vars(optimizer).get("notes", ""))
        + 256.0 * hasattr(optimizer, "late")
    ) / 100


CHANGED_OPTIMIZERS = (
    lambda _, trainer: trainer.optimizers[0].param_groups[0].update(mode="late"),
    lambda _, trainer: trainer.optimizers[0].param_groups[0]["names"].update(all=["b"]),
    lambda _, trainer: setattr(trainer.optimizers[0], "mode", "late"),
    lambda _, trainer: setattr(trainer.optimizers[0], "notes", "x"),
    lambda _, trainer: setattr(trainer.optimizers[0], "late", True),
)


def reached(step: Any) -> float:
    schedule, settings = step.lr_schedulers(), step.trainer.lr_scheduler_configs[0]
    return (
        schedule.gamma
        + 2.0 * getattr(schedule, "more", 0.0)
        + (4.0 if settings.name is None else 8.0)
        + 16.0 * getattr(step.trainer.strategy, "note", 0)
        + 32.0 * getattr(step.beside.scheduler, "note", 0)
    ) / 10


CHANGED_REACHED = (
    lambda _, trainer: setattr(trainer.lr_scheduler_configs[0].scheduler, "gamma", 0.5),
    lambda _, trainer: setattr(trainer.lr_scheduler_configs[0].scheduler, "more", 1.0),
    lambda _, trainer: setattr(trainer.lr_scheduler_configs[0], "name", "late"),
    lambda _, trainer: setattr(trainer.strategy, "note", 1),
    lambda _, trainer: setattr(trainer.lr_scheduler_configs[0].scheduler, "note", 1),
)


def replaced(step: Any) -> float:
    return (
        step.helper.level()
        + 4.0 * step.first.gain
        + 16.0 * step.function()
        + 128.0 * vars(step).get("late", 0.0)
        + 256.0 * step.helper.scale
    ) / 100


CHANGED_AS_A_WHOLE = (
    lambda module, _: setattr(module.helper, "__dict__", {"scale": 2.0, "items": []}),
    lambda module, _: setattr(module.helper, "__class__", OtherHelper),
    lambda module, _: setattr(module.first, "__class__", OtherBlock),
    lambda *_: setattr(with_default, "__defaults__", (2.0,)),
    lambda *_: setattr(with_default, "__code__", other_function.__code__),
    lambda module, _: setattr(module, "late", 1.0),
)
JOINT: dict[str, Any] = {"capture": "joint", "microbatches": 2}


def all_classes(folder: str, options: dict[str, Any]) -> list[float]:
    """Ask for classes on the ranks of this world; a worker function."""
    return trained(classes, (), options, logger=CSVLogger(folder))


def test_objects_have_the_classes_and_identities_of_one_device(tmp_path: Path) -> None:
    expected = trained(classes, (), None, logger=CSVLogger(tmp_path))
    assert expected[0] == 2.0**17 - 1
    for numbers in World(2).run(all_classes, str(tmp_path), {**JOINT, "layout": "1-1", "microbatches": 4}):
        assert numbers == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(
    ("see", "changes"),
    [(optimizers, CHANGED_OPTIMIZERS), (reached, CHANGED_REACHED), (replaced, CHANGED_AS_A_WHOLE)],
    ids=["optimizers", "reached by the trainer", "replaced as a whole"],
)
def test_a_change_of_anything_that_the_step_reads_is_seen_from_its_batch_on(see: Any, changes: Any) -> None:
    expected = trained(see, changes, None)
    assert len({*expected[:-1]}) > len(changes)  # every change is another number
    assert trained(see, changes, JOINT) == pytest.approx(expected, rel=1e-10)


def test_what_a_group_holds_is_looked_for_where_a_checkpoint_has_put_it(tmp_path: Path) -> None:
    file = tmp_path / "first.ckpt"
    module = Net(optimizers).double()
    data = DataLoader([torch.zeros(8, 6, dtype=torch.float64)] * BATCHES, batch_size=None)
    trainer = make_trainer("auto", max_epochs=1)
    trainer.fit(module, data)
    trainer.save_checkpoint(file)
    expected = trained(optimizers, CHANGED_OPTIMIZERS, None, checkpoint=file)
    found = trained(optimizers, CHANGED_OPTIMIZERS, JOINT, checkpoint=file)
    assert found == pytest.approx(expected, rel=1e-10)


def test_a_list_that_hangs_in_two_places_stays_one_list() -> None:
    def see(step: Any) -> float:
        step.same_items.append(1.0)
        return float(len(step.helper.items))

    expected = trained(see, (), None)
    assert trained(see, (), {"microbatches": 2}) == pytest.approx(expected, rel=1e-10)
