"""Faults while forwards of the next batch are in flight end a fit as all faults do, and the next fit is right."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_pipe.runtime.executor import Executor
from ranks.world import Died, Raised, World
from strategy.fits import Losses, dapple, make_trainer
from strategy.small import Small, samples

SOON = 60.0
INTERRUPTED = "KeyboardInterrupt or SystemExit"  # which Lightning makes of it
VERSIONS = {"layout": "1-1", "microbatches": 2, "planner": "uniform", "versions": "pipedream", "deadline_s": 20.0}


class Does(pl.Callback):
    """Do something in a hook of the third batch, on some ranks."""

    def __init__(self, what: str, ranks: tuple[int, ...]) -> None:
        self.what, self.ranks = what, ranks

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2 or trainer.global_rank not in self.ranks:
            return
        match self.what:
            case "raises":
                raise ZeroDivisionError("the user's mistake")
            case "stops":
                trainer.should_stop = True
            case "is interrupted":
                interrupt()


class Leaves(Small):
    """It leaves its epochs when the turn of the third batch comes."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class Breaks(Dataset[Any]):
    """Its thirteenth sample, of the fourth batch, cannot be read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        if index == 12:
            raise ZeroDivisionError("the user's mistake")
        return samples()[index]


def failing_at(text: str, action: Callable[[], None]) -> Any:
    """Let a compute of the third batch's round do something first, on this rank."""
    compute = Executor._compute

    def computing(self: Executor, one: Any, job: Any, results: Any) -> None:
        if job.step == 2 and str(one) == text:
            action()
        compute(self, one, job, results)

    return mock.patch.object(Executor, "_compute", computing)


def interrupt() -> None:
    """Be interrupted, as by Ctrl-C."""
    raise KeyboardInterrupt


def die() -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def train(
    callbacks: tuple[pl.Callback, ...] = (), data: Any = None, kind: type[Small] = Small, **options: Any
) -> tuple[list[float], list[Any]]:
    """Fit once."""
    module, losses = kind(), Losses()
    trainer = make_trainer(dapple(**VERSIONS), callbacks=[losses, *callbacks], **{"max_epochs": 1, **options})
    trainer.fit(module, module.data() if data is None else DataLoader(data, 4))
    return losses.losses, [p.detach().clone() for p in module.parameters()]


def twice(first: Callable[[], Any]) -> tuple[str, Any]:
    """Fit with a fault, and then without; a worker function."""
    text = "went on"
    try:
        first()
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    return text, train()


def by_hook(what: str, ranks: tuple[int, ...]) -> tuple[str, Any]:
    """Fit with a fault in a hook; a worker function."""
    return twice(lambda: train((Does(what, ranks),)))


def by_loader() -> tuple[str, Any]:
    """Fit with a batch that cannot be loaded; a worker function."""
    return twice(lambda: train(data=Breaks()))


def inside(text: str, rank: int, action: Callable[[], None]) -> tuple[str, Any]:
    """Fit with a fault in the middle of a round; a worker function."""
    is_here = torch.distributed.get_rank() == rank

    def first() -> None:
        with failing_at(text, action if is_here else lambda: None):
            train()

    return twice(first)


def fail() -> None:
    """Raise as the user's code does."""
    raise ZeroDivisionError("the user's mistake")


@pytest.mark.parametrize(
    ("worker", "arguments", "words"),
    [
        (by_hook, ("raises", (1,)), "the user's mistake"),
        pytest.param(by_loader, (), "the user's mistake", marks=pytest.mark.slow),
        pytest.param(inside, ("0I1", 0, fail), "the user's mistake", marks=pytest.mark.slow),
        (inside, ("1F1", 1, interrupt), INTERRUPTED),
        pytest.param(by_hook, ("raises", (0,)), "the user's mistake", marks=pytest.mark.slow),
        pytest.param(inside, ("0F2", 0, interrupt), INTERRUPTED, marks=pytest.mark.slow),
        pytest.param(inside, ("1I0", 1, fail), "the user's mistake", marks=pytest.mark.slow),
        pytest.param(by_hook, ("is interrupted", (0, 1)), INTERRUPTED, marks=pytest.mark.slow),
    ],
)
def test_an_error_ends_all_ranks_and_another_fit_is_right(
    worker: Callable[..., Any], arguments: tuple[Any, ...], words: str
) -> None:
    """Whether it is in a hook, in the data, or in the middle of a round; nothing of it is left for the next fit."""
    (wanted, weights), _ = World(2).run(train)
    for text, (losses, parameters) in World(2).run(worker, *arguments, deadline_s=SOON):
        assert any(word in text for word in words.split(" or ")), text
        assert losses == wanted
        assert all(torch.equal(a, b) for a, b in zip(parameters, weights, strict=True))


def stopped(what: str) -> Any:
    """Fit what is left early, and the batches before that without it; a worker function."""
    if what == "stops":
        return train((Does(what, (0, 1)),)), train(limit_train_batches=3)
    return train(kind=Leaves, max_epochs=2), train(max_epochs=2, limit_train_batches=2)


@pytest.mark.parametrize(("what", "batches"), [("stops", 3), ("leaves its epoch", 4)])
def test_what_is_in_flight_when_training_stops_is_forgotten(what: str, batches: int) -> None:
    """Weights are those of as many batches, after which nothing was expected."""
    for (losses, parameters), (wanted, weights) in World(2).run(stopped, what):
        assert losses == wanted and len(losses) == batches
        assert all(torch.equal(a, b) for a, b in zip(parameters, weights, strict=True))


def killed(text: str, rank: int) -> None:
    """Fit until this rank is killed; a worker function."""
    is_here = torch.distributed.get_rank() == rank
    with failing_at(text, die if is_here else lambda: None):
        train()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_the_middle_of_a_round_is_named(rank: int) -> None:
    """The other one ends with its name."""
    results = World(2).results(killed, text := "0I1" if rank == 0 else "1F1", rank, deadline_s=SOON)
    other = results[1 - rank]
    assert isinstance(results[rank], Died)
    assert isinstance(other, Raised) and f"Rank {rank} died at {text} of step 2" in other.text, other
