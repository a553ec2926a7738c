"""What cannot work is refused before training, with the reason and the way out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as cb
from torch import nn

from lightning_pipe import DappleStrategy
from lightning_pipe.errors import BatchError, CaptureError, ConfigError, UnsupportedError
from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import dapple, make_trainer

NAME = "parameter_groups"


def changed(change: Callable[[pl.LightningModule], Any]) -> pl.LightningModule:
    module = make_module(NAME)
    change(module)
    return module


def of_class(**members: Any) -> pl.LightningModule:
    module = make_module(NAME)
    module.__class__ = type("Changed", (type(module),), members)
    return module


MODULES = {
    "manual optimization": lambda: changed(lambda m: setattr(m, "automatic_optimization", False)),
    "overrides backward": lambda: of_class(backward=lambda self, loss: loss.backward()),
    "LBFGS": lambda: of_class(configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters())),
    "`dataloader_iter`": lambda: of_class(training_step=lambda self, dataloader_iter: None),
    "no values": lambda: changed(lambda m: setattr(m, "head", nn.Linear(12, 7, device="meta"))),
    "head of .* is TorchScript": lambda: changed(lambda m: setattr(m, "head", torch.jit.script(nn.Linear(12, 7)))),
    "adjacency of .* has the layout torch.sparse_coo": lambda: changed(
        lambda m: m.register_buffer("adjacency", torch.eye(3).to_sparse())
    ),
    "Run the module once before trainer.fit": lambda: changed(lambda m: setattr(m, "head", nn.LazyLinear(7))),
}
CALLBACKS = {
    "BatchSizeFinder": lambda: cb.BatchSizeFinder(),
    "ModelPruning": lambda: cb.ModelPruning("l1_unstructured"),
}


def fit(module: pl.LightningModule, **trainer: Any) -> None:
    make_trainer(dapple(), max_epochs=1, **trainer).fit(module, make_loader(NAME))


@pytest.mark.parametrize("words", MODULES)
def test_a_module_that_cannot_work_is_refused(words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        fit(MODULES[words]())


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_callback_that_needs_the_whole_module_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"The callback {name} "):
        fit(make_module(NAME), callbacks=[CALLBACKS[name]()])


def as_jagged(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(samples, layout=torch.jagged)


@pytest.mark.parametrize("collate", [as_jagged, lambda samples: torch.stack(samples).to_sparse()])
def test_a_batch_that_holds_no_plain_tensors_is_refused(collate: Callable[[list[torch.Tensor]], torch.Tensor]) -> None:
    loader = torch.utils.data.DataLoader([torch.ones(n, 4) for n in (2, 2)], 2, collate_fn=collate)
    with pytest.raises(TypeError, match="Let the collate function return plain tensors"):
        make_trainer(dapple(), max_epochs=1).fit(make_module(NAME), loader)


def test_unknown_options_are_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="microbatches"):
        DappleStrategy(microbatch=3)
    with pytest.raises(ConfigError, match="either a config or its fields"):
        DappleStrategy(DappleStrategy().config, microbatches=3)


class Clipping(pl.Callback):
    """Looks at gradients by itself."""

    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


def warnings_of(callbacks: list[pl.Callback]) -> list[str]:
    trainer = make_trainer(dapple(layout="1-1"), max_epochs=1, callbacks=callbacks, gradient_clip_val=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(make_module(NAME), make_loader(NAME))
    return [str(warning.message) for warning in caught if "gradients of this rank" in str(warning.message)]


def test_hooks_that_see_a_part_of_the_gradients_are_named_once() -> None:
    assert World(2).run(warnings_of, []) == [[], []]
    first, other = World(2).run(warnings_of, [Clipping()])
    assert len(first) == 1 and "Clipping.on_before_optimizer_step" in first[0]
    assert other == []


@pytest.mark.parametrize(("microbatches", "samples"), [(4, 2), (4, 3), (8, 6), (2, 1), (64, 8)])
def test_more_micro_batches_than_samples_are_refused_before_planning(microbatches: int, samples: int) -> None:
    """A few more ended in an IndexError of the planner."""
    expected = f"The first batch has {samples} samples, but {microbatches} micro-batches are wanted. Set .* {samples},"
    trainer = make_trainer(dapple(microbatches=microbatches, planner="auto"), max_epochs=1)
    with pytest.raises(BatchError, match=expected):
        trainer.fit(make_module(NAME), make_loader(NAME, batch_size=samples))


class SkipsFirst(pl.LightningModule):
    """Skips the first batch, before or after it has called its sub-modules."""

    def __init__(self, *, early: bool) -> None:
        super().__init__()
        self.one, self.two, self.early = nn.Linear(3, 3), nn.Linear(3, 1), early

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.early and batch_idx == 0:
            return None
        loss = self.two(torch.tanh(self.one(batch))).square().mean()
        return None if batch_idx == 0 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("capture", ["auto", "replay"])
@pytest.mark.parametrize("early", [True, False])
def test_a_first_batch_that_is_skipped_is_named(early: bool, capture: str) -> None:
    trainer = make_trainer(dapple(capture=capture, microbatches=2), max_epochs=1)
    with pytest.raises(CaptureError, match=r"returns None for the batch by which .*: the first batch, or"):
        trainer.fit(SkipsFirst(early=early), torch.utils.data.DataLoader(torch.randn(12, 3), batch_size=4))
