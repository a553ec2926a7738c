"""What hooks of a batch's transfer leave on the module is there for the step of every rank, as on one device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from ranks.world import World
from strategy.small import LAYOUTS, Small, assert_as_on_one_device, loader, run


class Net(Small):
    """With a validation."""

    validation = staticmethod(lambda: loader(size=5))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


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


def fitted(name: str, options: dict[str, Any] | None) -> tuple[Any, ...]:
    """Fit one of them; a worker function."""
    return run(KINDS[name], options)


@pytest.mark.sampled
@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("name", KINDS)
def test_what_hooks_leave_is_there_on_ranks_that_load_nothing(name: str, options: dict[str, Any]) -> None:
    """A share of a mixup that such a hook sets was 1 for the stages that load nothing, or missing."""
    assert_as_on_one_device(fitted, name, options)


class NewTensor(Small):
    """A tensor that a hook makes for every batch, so that the step is replayed, and its first batch planned late."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.noise = torch.full((8,), 0.01 * (1 + batch_idx), dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.first(batch[0]) + self.noise
        return torch.nn.functional.cross_entropy(self.last(hidden.tanh()), batch[1])


def warned(options: dict[str, Any]) -> list[str]:
    """Return what is warned of batches after the first; a worker function."""
    with mock.patch("lightning_pipe.strategy.steps.runner.warnings.warn") as warn:
        run(NewTensor, options)
    return [said for call in warn.call_args_list if "which it did not do" in (said := str(call.args[0]))]


def test_calls_of_this_package_are_no_calls_of_the_step() -> None:
    """A warning named `requires_grad_` and `reshape`, which nobody had written, in the line that calls `fit`."""
    assert World(2).run(warned, LAYOUTS[0]) == [[], []]
