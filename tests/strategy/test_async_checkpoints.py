"""A directory that is written behind the training: what it holds, what waits for it, and what a failure leaves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_pipe import DappleStrategy
from lightning_pipe.errors import ConfigError
from lightning_pipe.strategy.checkpoints import sharded
from models.parity import make_loader, make_module
from ranks.world import Raised, World
from strategy.fits import dapple, make_trainer

F64 = {"dtype": torch.float64}
OPTIONS = {"layout": "1-1", "microbatches": 2, "save_distributed_checkpoint": True}
BEHIND = {**OPTIONS, "async_checkpoint": True}
STEPS = 3  # of an epoch


class Disk:
    """Tensors reach the disk of this rank when it lets them, until it is full.

    Args:
        room: for so many checkpoints.
    """

    def __init__(self, room: int = 100) -> None:
        self.lets, self.room = threading.Event(), room
        self.lets.set()
        self._usual = FileSystemWriter.write_data

    def __enter__(self) -> Disk:
        def write_data(writer: Any, *arguments: Any) -> Any:
            self.lets.wait()
            self.room -= 1
            if self.room < 0:
                raise OSError(28, "No space left on device")
            return self._usual(writer, *arguments)

        FileSystemWriter.write_data = write_data
        return self

    def __exit__(self, *_: object) -> None:
        FileSystemWriter.write_data = self._usual
        self.lets.set()


class AtStep(pl.Callback):
    """Call something after a training step."""

    def __init__(self, calls: dict[int, Callable[[], None]]) -> None:
        self.calls = calls

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.calls.get(trainer.global_step, lambda: None)()


def every_step(folder: str, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, **options)


def train(strategy: DappleStrategy, *callbacks: pl.Callback, load: str | None = None, **options: Any) -> pl.Trainer:
    """Fit a module, which is drawn anew."""
    options = {"max_epochs": 1, "enable_checkpointing": True, **options}
    trainer = make_trainer(strategy, callbacks=[*callbacks], **options)
    torch.manual_seed(5)
    trainer.fit(make_module("gpt_tied", **F64).train(), make_loader("gpt_tied", **F64), ckpt_path=load)
    return trainer


def content(path: Path) -> dict[str, torch.Tensor]:
    tensors = sharded.Directory(path)
    return {name: tensors[name].read() for name in tensors}


def names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def saved_every_step(folder: str, options: dict[str, Any]) -> str:
    callback = every_step(folder, save_top_k=-1, save_last=True, monitor="step", mode="max")
    train(dapple(**options), callback)
    return callback.best_model_path


def resumed(path: str) -> int:
    trainer = train(dapple(**BEHIND), load=path, max_epochs=2, enable_checkpointing=False)
    return trainer.global_step


def test_what_is_written_behind_is_what_is_written_at_once(tmp_path: Path) -> None:
    """Every checkpoint of an epoch has the same tensors, and training goes on from it."""
    for options, name in ((OPTIONS, "once"), (BEHIND, "behind")):
        best = World(2).run(saved_every_step, str(tmp_path / name), options)
        assert [Path(path).name for path in best] == [f"step={STEPS}.ckpt"] * 2
    assert names(tmp_path / "behind") == names(tmp_path / "once")
    for path in (tmp_path / "once").iterdir():
        found, expected = content(tmp_path / "behind" / path.name), content(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert World(2).run(resumed, str(tmp_path / "behind" / "last.ckpt")) == [2 * STEPS] * 2


def held_back(folder: str) -> tuple[list[str], list[str], list[str]]:
    """Return what is there before a checkpoint can be written, after the step in which it can, and after the fit."""
    seen: list[list[str]] = []
    with Disk() as disk:
        look = lambda: seen.append(names(folder))  # noqa: E731
        calls = {1: disk.lets.clear, STEPS: lambda: (look(), disk.lets.set())}
        callback = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=1, monitor="step")
        train(dapple(**BEHIND), AtStep(calls), callback)
    return (*seen, names(folder))


def test_training_goes_on_and_a_name_appears_at_the_end(tmp_path: Path) -> None:
    """The disk is slow from before step 2, which is saved, until step 3 is over."""
    for before, after in World(2).run(held_back, str(tmp_path)):
        assert before == [".step=2.ckpt.lightning_pipe.part"]
        assert after == ["step=2.ckpt"]
    at_once = tmp_path / "once"
    World(2).run(saved_at, str(at_once), 2)
    found, expected = content(tmp_path / "step=2.ckpt"), content(at_once / "step=2.ckpt")
    assert all(torch.equal(found[key], expected[key]) for key in expected)  # of that step, not of a later one


def saved_at(folder: str, step: int) -> None:
    train(dapple(**OPTIONS), ModelCheckpoint(folder, filename="{step}", every_n_train_steps=step))


def fails_on(rank: int, room: int, folder: str) -> list[str]:
    """The disk of a rank is full after some steps; each step saves a checkpoint that replaces the one before."""
    with Disk(room=room if dist.get_rank() == rank else 100):
        train(dapple(**BEHIND), every_step(folder, save_top_k=1, monitor="step", mode="max"))
    return names(folder)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("rank", "room"), [(0, 1), (1, 1), (1, STEPS - 1)])
def test_a_rank_that_cannot_write_is_named_and_the_one_before_stays(rank: int, room: int, tmp_path: Path) -> None:
    """The last one is waited for when the fit ends."""
    for result in World(2).results(fails_on, rank, room, str(tmp_path)):
        assert isinstance(result, Raised) and result.kind == "PipelineError"
        assert (
            f"rank {rank} could not write its part" in result.text and f"no space is left at {tmp_path}" in result.text
        )
    assert f"step={room}.ckpt" in names(tmp_path)
    assert content(tmp_path / f"step={room}.ckpt")


class Breaks(pl.Callback):
    """The training fails on all ranks after step 2; the disk is as slow as given."""

    def __init__(self, disk: Disk, *, is_slow: bool) -> None:
        self.disk, self.is_slow = disk, is_slow

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 1 and self.is_slow:
            self.disk.lets.clear()
        if trainer.global_step == 2:
            raise RuntimeError("the user's own")


def broken(folder: str, is_slow: bool) -> tuple[list[str], list[str]]:
    """Return the warnings and what is there."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("lightning_pipe.strategy.checkpoints.writing")
    log.addHandler(handler)
    with Disk() as disk:
        callbacks = [Breaks(disk, is_slow=is_slow), every_step(folder, save_top_k=1, monitor="step", mode="max")]
        with pytest.raises(RuntimeError, match="the user's own"):
            train(dapple(**BEHIND, deadline_s=6.0), *callbacks)
        there = names(folder)
    log.removeHandler(handler)
    return said, there


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_failed_training_leaves_a_complete_checkpoint(is_slow: bool, tmp_path: Path) -> None:
    for said, there in World(2).run(broken, str(tmp_path), is_slow):
        if is_slow:
            assert there == [".step=2.ckpt.lightning_pipe.part", "step=1.ckpt"]
            assert all("step=2.ckpt was complete" in text for text in said) and said
        else:
            assert {"step=2.ckpt"} <= {*there} <= {"step=1.ckpt", "step=2.ckpt"} and not said  # what goes may be there


def saved_at_exception(folder: str) -> list[str]:
    class Fails(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 2:
                raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        train(dapple(**BEHIND), Fails(), OnExceptionCheckpoint(folder))
    return names(folder)


def test_what_is_saved_at_an_exception_is_complete(tmp_path: Path) -> None:
    assert World(2).run(saved_at_exception, str(tmp_path)) == [["on_exception.ckpt"]] * 2


def saved_after(folder: str) -> list[str]:
    trainer = train(dapple(**BEHIND), enable_checkpointing=False)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    return names(folder)


def test_after_the_fit_there_is_nothing_to_go_on_with(tmp_path: Path) -> None:
    assert World(2).run(saved_after, str(tmp_path)) == [["after.ckpt"]] * 2


def test_only_directories_are_written_behind() -> None:
    with pytest.raises(ConfigError, match="without save_distributed_checkpoint"):
        DappleStrategy(async_checkpoint=True)
