"""Optimizers train, are saved and resumed, and follow a change of plans as on one device, or are refused before."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.errors import UnsupportedError
from lightning_pipe.strategy.checkpoints.consolidate import consolidate
from lightning_pipe.strategy.checks.separable import check_separable
from ranks.world import World
from slow import slow_but
from strategy.fits import dapple, make_trainer
from strategy.optimizer_kinds import REFUSED, REFUSED_ON_RANKS, TRAINED, InAttributes, Lookahead
from strategy.small import assert_alike
from strategy.test_held_later import PLAN, Cropped
from strategy.test_second_plan import changing, strategy_of

STEPS, SAVED_AT = 8, 5
PIPE = {"layout": "1-1", "microbatches": 4}
EVERY_TIME = {"Muon and AdamW", "ScheduleFree", "Lookahead", "Counting"}
KINDS = {**TRAINED, **{kind: make for kind, (make, _) in {**REFUSED, **REFUSED_ON_RANKS}.items()}}
UNMOVABLE = {"InAttributes"}  # they keep more of a parameter than their states, so the first plan stays


class Net(pl.LightningModule):
    """Three layers, trained by an optimizer of the table whose rate begins at 0 and changes with every step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 1)
        self.kind = kind
        self.double()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.c(self.b(self.a(batch).tanh()).tanh()) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = KINDS[self.kind](self)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}

    def on_train_batch_start(self, *_: Any) -> None:
        if hasattr(self.optimizers().optimizer, "train"):
            self.optimizers().optimizer.train()


class Save(pl.Callback):
    """Save after a step, with the weights of evaluation where the optimizer has such."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == SAVED_AT:
            if hasattr(trainer.optimizers[0], "eval"):
                trainer.optimizers[0].eval()
            trainer.save_checkpoint(self.path)


def fit(kind: str, strategy: Any, *, save: str = "", load: str | None = None) -> list[torch.Tensor]:
    """Train, and return the weights."""
    module = Net(kind)
    data = torch.randn(8 * STEPS, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    callbacks = [Save(save)] if save else []
    trainer = make_trainer(strategy, max_epochs=1, callbacks=callbacks, gradient_clip_val=0.5)
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=load)
    return [parameter.detach().clone() for parameter in module.parameters()]


def trained(kind: str, path: str, options: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Train with a checkpoint and a change of plans on the way; return the weights and the number of plans."""
    with changing({}) as plans:
        return fit(kind, strategy_of({**PIPE, **options}), save=path), len(plans)


def resumed(kind: str, path: str, options: dict[str, Any]) -> list[torch.Tensor]:
    return fit(kind, dapple(**{"layout": "2", "microbatches": 2, "replan": False, **options}), load=path)


def resumed_afresh(kind: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """Fit as in a new process: torch follows all steps of a class once it has made a copy of an optimizer of it."""
    while getattr(Lookahead.step, "hooked", False):
        Lookahead.step = Lookahead.step.__wrapped__  # type: ignore[method-assign]
    return resumed(kind, None, options)


@pytest.mark.parametrize("kind", slow_but(EVERY_TIME, TRAINED))
def test_training_saving_and_resuming_are_those_of_one_device(kind: str, tmp_path: Path) -> None:
    plain, ours = str(tmp_path / "plain.ckpt"), str(tmp_path / "ours.ckpt")
    expected, expected_later = fit(kind, "auto", save=plain), fit(kind, "auto", load=plain)
    ran = World(2).run(trained, kind, ours, {})
    for found, _ in ran:
        assert_alike(found, expected)
    assert ran[0][1] == (0 if kind in UNMOVABLE else 2)
    files = [torch.load(path, weights_only=False) for path in (ours, plain)]
    assert_alike(*([file["optimizer_states"], dict(file["state_dict"])] for file in files))
    for found in World(2).run(resumed, kind, ours, {}):
        assert_alike(found, expected_later)


@pytest.mark.parametrize("kind", slow_but(EVERY_TIME, ["Muon and AdamW", "Adafactor", "SlowState", "ByOrder"]))
def test_a_directory_holds_any_tree(kind: str, tmp_path: Path) -> None:
    """Its state is that of the plain file, and ranks that share it go on from there."""
    plain, ours, file = tmp_path / "plain.ckpt", tmp_path / "ours.ckpt", tmp_path / "file.ckpt"
    fit(kind, "auto", save=str(plain))
    World(2).run(trained, kind, str(ours), {"save_distributed_checkpoint": True, "replan": False})
    consolidate(ours, file)
    assert_alike(*(torch.load(path, weights_only=False)["optimizer_states"] for path in (file, plain)))
    expected = fit(kind, "auto", load=str(plain))
    for found in World(2).run(resumed, kind, str(ours), {"shard_optimizer": "on"}):
        assert_alike(found, expected)


def all_gradients(kind: str) -> list[torch.Tensor]:
    return fit(kind, dapple(layout="2", microbatches=2, shard_optimizer="off"))


@pytest.mark.parametrize("kind", ["Sam", "Prodigy"])
def test_data_parallel_ranks_step_what_couples_all_gradients(kind: str) -> None:
    expected = fit(kind, "auto")
    for found in World(2).run(all_gradients, kind):
        assert_alike(found, expected)


@pytest.mark.parametrize("kind", REFUSED_ON_RANKS)
def test_what_other_ranks_would_not_learn_is_refused(kind: str) -> None:
    for result in World(2).results(resumed_afresh, kind, {"shard_optimizer": "on"}):
        assert re.search(REFUSED_ON_RANKS[kind][1], result.text) and 'shard_optimizer="off"' in result.text


class MovesLater(Cropped):
    """Its optimizer keeps more of a layer than can move to the rank that trains it from a later step on."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return InAttributes(self.parameters())


def trained_later(plan: str) -> None:
    data = TensorDataset(torch.randn(16, 4, dtype=torch.float64), torch.randint(3, (16,)))
    make_trainer(dapple(plan=plan), max_epochs=2).fit(MovesLater(), DataLoader(data, 4))


def test_what_cannot_move_is_refused_when_it_would_have_to(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    for result in World(2).results(trained_later, str(tmp_path / "plan.yaml")):
        assert re.search(r"InAttributes keeps more of \S+ than optimizer.state\[parameter\] has", result.text)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_rank_can_step_is_refused(kind: str) -> None:
    make, said = REFUSED[kind]
    optimizer = make(Net("AdamW"))
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # where a warm-up begins
    with pytest.raises(UnsupportedError, match=said):
        check_separable(optimizer, 2, device=torch.device("cpu"))
