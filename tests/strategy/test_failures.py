"""A mistake of the user is one clear error on every rank; a failure of one rank ends all of them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.runtime.guard.client import guard_of_this_process
from lightning_pipe.runtime.guard.failure import Failure
from lightning_pipe.runtime.guard.watch import PeerFailure
from models.parity import make_loader, make_module
from ranks.world import Raised, World
from strategy.fits import dapple, make_trainer


def fit(options: dict[str, Any], callbacks: tuple[pl.Callback, ...] = (), batch_size: int = 8) -> None:
    trainer = make_trainer(dapple(**options), max_epochs=1, callbacks=list(callbacks))
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


@pytest.mark.sampled
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_optimizer_step", "on_validation_start"])
def test_an_error_in_a_hook_of_one_rank_ends_all(rank: int, hook: str) -> None:
    results = World(2).results(fit_validated, {"microbatches": 2}, (FailsOn(rank, hook),), deadline_s=30)
    assert isinstance(results[rank], Raised) and results[rank].kind == "ZeroDivisionError", results[rank]
    other = results[1 - rank]
    assert isinstance(other, Raised) and "the user's mistake" in other.text, other


class HearsOfFailure(pl.Callback):
    """Hears of the failure of another rank before the optimizer's second step, and counts steps from then on."""

    def __init__(self) -> None:
        self.stepped = 0

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if trainer.global_step == 1:
            optimizer.register_step_post_hook(self.note)
            guard = guard_of_this_process()
            failure = Failure(1, "at 1F0 of step 2", "ValueError: user", session=guard.session, raised=True)
            guard.fail(failure, wait_s=30.0)

    def note(self, *_: Any) -> None:
        self.stepped += 1


def fit_hearing() -> tuple[str, int]:
    hears = HearsOfFailure()
    try:
        fit({"microbatches": 2}, (hears,))
    except PeerFailure as failure:
        return str(failure), hears.stepped
    return "", hears.stepped


def test_no_optimizer_steps_when_a_failure_was_heard_before() -> None:
    for text, stepped in World(2).run(fit_hearing):
        assert "Rank 1 failed at 1F0 of step 2: ValueError: user" in text and stepped == 0


def fit_validated(options: dict[str, Any], callbacks: tuple[pl.Callback, ...]) -> None:
    trainer = make_trainer(dapple(**options), max_epochs=1, callbacks=list(callbacks))
    trainer.fit(make_module("dict_batch"), make_loader("dict_batch"), make_loader("dict_batch"))


class Broken(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise OSError("the disk is broken")
        return torch.ones(4), torch.tensor(1)


def fit_broken() -> None:
    trainer = make_trainer(dapple(microbatches=2), max_epochs=1)
    trainer.fit(make_module("parameter_groups"), torch.utils.data.DataLoader(Broken(), batch_size=2))


def test_an_error_of_the_data_set_is_heard_everywhere() -> None:
    loading, following = World(2).results(fit_broken, deadline_s=30)
    assert isinstance(loading, Raised) and loading.kind == "OSError"
    assert isinstance(following, Raised) and "Rank 0" in following.text, following


class Branching(pl.LightningModule):
    """Takes a branch that depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.second(self.first(batch)).square().mean()
        if batch.max() < 10:
            loss = 2 * loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit_branching(large_from: int, capture: str = "auto") -> float:
    batches = torch.ones(8, 2)
    batches[large_from:] = 20
    trainer = make_trainer(dapple(layout="1-1", microbatches=2, capture=capture), max_epochs=1)
    torch.manual_seed(0)
    trainer.fit(Branching(), DataLoader(batches, 4))
    return trainer.fit_loop.epoch_loop.global_step


def test_a_branch_is_captured_as_the_first_batch_takes_it() -> None:
    assert World(2).run(fit_branching, 8) == [2, 2]


def test_a_batch_that_takes_another_branch_is_an_error_that_names_the_line() -> None:
    """Where only a graph is allowed; else the step is replayed from then on (tests/strategy/test_replay.py)."""
    assert World(2).run(fit_branching, 4) == [2, 2]
    for result in World(2).results(fit_branching, 4, "joint"):
        assert isinstance(result, Raised) and result.kind in ("PipelineError", "PeerFailure")
        assert "test_failures.py:" in result.text and "answer True" in result.text


class Uneven(Branching):
    """The tensors of a batch have different numbers of rows."""

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.second(self.first(batch["nodes"])).mean() * batch["edges"].mean()


def fit_uneven(microbatches: int | None) -> list[float]:
    batches = [{"nodes": torch.ones(3 + n, 2), "edges": torch.ones(7 - n)} for n in range(2)]
    module = Uneven()
    make_trainer(dapple(microbatches=microbatches), max_epochs=1).fit(module, DataLoader(batches, None))
    return [p.sum().item() for p in module.parameters()]


def test_batches_that_cannot_be_cut_are_trained_whole_or_refused() -> None:
    for result in World(2).results(fit_uneven, 2):
        assert isinstance(result, Raised) and result.kind == "BatchError"
        assert "disagree about the number of samples" in result.text and "tensor 1 has 7" in result.text
    for wanted in (1, None):
        one, two = World(2).run(fit_uneven, wanted)
        assert one == two


def fit_nothing(limit: int) -> list[bool]:
    module = make_module("dict_batch")
    trainer = make_trainer(dapple(), max_epochs=1, limit_train_batches=limit)
    trainer.fit(module, make_loader("dict_batch"), make_loader("dict_batch"))
    return [p.is_meta for p in module.parameters()]


def test_a_fit_without_training_batches_does_nothing() -> None:
    for found in World(2).run(fit_nothing, 0):
        assert not any(found)
