"""Checkpoints at an exception: saved where all ranks come to it between two batches, else the reason is said."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as cb
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.config import WeightVersions
from lightning_pipe.errors import AbsentError, PipelineError
from lightning_pipe.runtime.guard.watch import PeerFailure
from models.parity import make_loader, make_module
from ranks.world import World
from strategy.fits import dapple, make_trainer

NAME = "parameter_groups"


class FailsOn(pl.Callback):
    """Raise on one rank alone, or on all."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.rank in (None, trainer.global_rank):
            raise FloatingPointError("on one rank" if self.rank is not None else "on all")


class SavingOnException(cb.ModelCheckpoint):
    """What `ModelCheckpoint(save_on_exception=True)` is in newer Lightning."""

    save_on_exception = True

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.save_on_exception = True


def fail_and_save(
    callback: type, rank: int | None, folder: str, versions: WeightVersions = "sync"
) -> tuple[str, list[str]]:
    """Return the error of this rank, and what it was warned of."""
    options = {"planner": "uniform", "microbatches": 2} if versions != "sync" else {}
    strategy = dapple(layout="1-1", deadline_s=6, versions=versions, **options)
    callbacks = [callback(folder), FailsOn(rank)]
    trainer = make_trainer(strategy, max_epochs=1, callbacks=callbacks, enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(make_module(NAME), make_loader(NAME))
        except Exception as error:
            return type(error).__name__, [str(warning.message) for warning in caught]
    return "", []


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("callback", "rank"), [(cb.OnExceptionCheckpoint, 1), (SavingOnException, 0)])
def test_where_one_rank_fails_alone_no_checkpoint_is_saved_and_the_reason_is_said(
    callback: type, rank: int, tmp_path: Any
) -> None:
    results = World(2).results(fail_and_save, callback, rank, str(tmp_path))
    errors = [result.value[0] for result in results]
    assert errors[rank] == "FloatingPointError" and errors[1 - rank] == "PeerFailure", errors
    (said,) = [text for text in results[0].value[1] if "saves no checkpoint" in text]
    assert "FloatingPointError after optimizer step 1" in said or "on one rank" in said
    assert not [*tmp_path.iterdir()]


def test_where_all_fail_with_batches_fetched_ahead_the_weights_of_all_are_saved(tmp_path: Path) -> None:
    """Ranks that load have told of one batch more, of which the others need not have heard: no other place."""
    results = World(2).run(fail_and_save, SavingOnException, None, str(tmp_path), "pipedream")
    assert [error for error, _ in results] == ["FloatingPointError"] * 2
    assert not [text for _, said in results for text in said if "saves no checkpoint" in text]
    (saved,) = tmp_path.iterdir()
    assert torch.load(saved, weights_only=False)["global_step"] == 1


class Broken(DataLoader):
    """The fourth batch cannot be made."""

    def __init__(self) -> None:
        super().__init__(range(12), 2, collate_fn=self.made)

    def made(self, indices: list[int]) -> torch.Tensor:
        if 6 in indices:
            raise KeyError("no batch")
        return torch.full((2, 6), float(indices[0]), dtype=torch.float64)


def fail_to_load(layout: str, folder: str) -> tuple[str, list[int]]:
    """Return the error of this rank, and the steps of the checkpoints that were saved."""
    trainer = make_trainer(
        dapple(layout=layout, deadline_s=30),
        max_epochs=1,
        callbacks=[cb.OnExceptionCheckpoint(folder)],
        enable_checkpointing=True,
    )
    with pytest.raises((KeyError, PipelineError)) as caught:
        trainer.fit(Normed(), Broken())
    return caught.typename, [torch.load(file, weights_only=False)["global_step"] for file in Path(folder).glob("*")]


@pytest.mark.parametrize(("layout", "errors"), [("1-1", ["KeyError", "PipelineError"]), ("2", ["KeyError"] * 2)])
def test_an_error_of_a_loader_saves_the_weights_of_all(layout: str, errors: list[str], tmp_path: Path) -> None:
    found = World(2).run(fail_to_load, layout, str(tmp_path))
    assert [error for error, _ in found] == errors
    assert found[0][1] == [3]


class Preempted(pl.Callback):
    """A scheduler that wants one of the hosts back."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def preempt(folder: str) -> dict[str, Any]:
    callbacks = [SavingOnException(folder), Preempted()]
    trainer = make_trainer(dapple(layout="1-1"), max_epochs=9, callbacks=callbacks, enable_checkpointing=True)
    try:
        trainer.fit(make_module(NAME), make_loader(NAME))
    except BaseException as error:
        saved = [torch.load(file, weights_only=False) for file in Path(folder).glob("*.ckpt")]
        return {"error": type(error).__name__, "steps": [one["global_step"] for one in saved]}
    return {}


def test_a_preemption_of_one_rank_saves_the_weights_of_all(tmp_path: Path) -> None:
    for result in World(2).run(preempt, str(tmp_path)):
        assert result["error"] == "SIGTERMException" and len(result["steps"]) == 1, result
        assert 2 <= result["steps"][0] <= 3, result


class Normed(pl.LightningModule):
    """Batch statistics on the first and on the last stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
        self.layers = nn.Sequential(*layers).double()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class GivesUp(pl.Callback):
    """Raise on all ranks after the second batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.strategy.barrier()  # all have taken this step
            raise FloatingPointError("on all ranks")


def fit_after_failing(options: dict[str, Any] | None) -> tuple[dict[str, torch.Tensor], list[str], list[str]]:
    """Fit, fail, and fit again; return what is left, what reading the module in between said, and warnings."""
    module, said = Normed(), list[str]()
    data = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for callbacks in ([GivesUp()], []):
        strategy = "auto" if options is None else dapple(**options)
        trainer = make_trainer(strategy, max_epochs=1, callbacks=callbacks)
        with warnings.catch_warnings(record=True) as caught, contextlib.suppress(FloatingPointError, PeerFailure):
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(data, 8))
        if callbacks:
            for read in (
                module.state_dict,
                lambda: module.layers[1].running_mean + 1,
                lambda: module.layers[4].running_mean + 1,
            ):
                try:
                    read()
                except AbsentError as error:
                    said.append(str(error))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return state, said, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("capture", ["joint", "replay"])
def test_what_a_failed_fit_leaves_is_not_taken_for_the_module_and_another_fit_goes_on_from_it(capture: str) -> None:
    """The state of the module was empty tensors for what other ranks held, and another fit refused them."""
    expected, *_ = fit_after_failing(None)
    results = World(2).run(fit_after_failing, {"layout": "1-1", "microbatches": 1, "capture": capture})
    for found, said, _ in results:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert len(said) == 2, said
        assert all("The fit has failed, so that each rank has what it held" in one for one in said)
    assert any("The fit before this one has failed" in one for one in results[0][2])
