"""A mistake of the user is one clear error on every rank; a failure of one rank ends all of them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_pipe.strategy.strategy import DappleStrategy
from models.parity import make_loader, make_module
from ranks.world import Raised, World
from strategy.fits import make_trainer


def fit(options: dict[str, Any], callbacks: tuple[pl.Callback, ...] = (), batch_size: int = 8) -> None:
    trainer = make_trainer(DappleStrategy(**options), max_epochs=1, callbacks=list(callbacks))
    trainer.fit(make_module("dict_batch"), make_loader("dict_batch", batch_size=batch_size))


@pytest.mark.parametrize(
    ("options", "batch_size", "kind", "words"),
    [
        ({"microbatches": 9}, 8, "BatchError", "first batch has 8 samples, but 9 micro-batches"),
        ({"layout": "1-1-1"}, 8, "PlanError", "asks for 3 ranks, the trainer has 2"),
        ({"plan": "nowhere.yaml"}, 8, "PlanError", "nowhere.yaml"),
    ],
)
def test_mistakes_are_told_on_every_rank_before_training(
    options: dict[str, Any], batch_size: int, kind: str, words: str
) -> None:
    for result in World(2).results(fit, options, (), batch_size):
        assert isinstance(result, Raised), result
        assert result.kind == kind and words in result.text, result.text


class FailsOn(pl.Callback):
    """Raise in a hook on one rank."""

    def __init__(self, rank: int, hook: str) -> None:
        self.rank = rank
        setattr(self, hook, self.fail)

    def fail(self, *_: Any) -> None:
        if dist.get_rank() == self.rank:
            raise ZeroDivisionError("the user's mistake")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step", "on_validation_start"])
def test_an_error_in_a_hook_of_one_rank_ends_all(rank: int, hook: str) -> None:
    results = World(2).results(fit_validated, {"microbatches": 2}, (FailsOn(rank, hook),), deadline_s=30)
    assert isinstance(results[rank], Raised) and results[rank].kind == "ZeroDivisionError", results[rank]
    other = results[1 - rank]
    assert isinstance(other, Raised) and "the user's mistake" in other.text, other


def fit_validated(options: dict[str, Any], callbacks: tuple[pl.Callback, ...]) -> None:
    trainer = make_trainer(DappleStrategy(**options), max_epochs=1, callbacks=list(callbacks))
    trainer.fit(make_module("dict_batch"), make_loader("dict_batch"), make_loader("dict_batch"))


class Broken(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise OSError("the disk is broken")
        return torch.ones(4), torch.tensor(1)


def fit_broken() -> None:
    trainer = make_trainer(DappleStrategy(microbatches=2), max_epochs=1)
    trainer.fit(make_module("parameter_groups"), torch.utils.data.DataLoader(Broken(), batch_size=2))


def test_an_error_of_the_data_set_is_heard_everywhere() -> None:
    loading, following = World(2).results(fit_broken, deadline_s=30)
    assert isinstance(loading, Raised) and loading.kind == "OSError"
    assert isinstance(following, Raised) and "Rank 0" in following.text, following
