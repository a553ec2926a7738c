"""Nobody waits in vain, and nothing is left behind: deaths, hangs and habits that ranks do not share."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.capture import allocations
from lightning_pipe.config import read_config
from lightning_pipe.errors import ConfigError, PipelineError
from lightning_pipe.runtime.guard.client import GuardClient
from lightning_pipe.runtime.guard.guarded_watch import GuardedWatch
from lightning_pipe.runtime.guard.watch import patience_until
from lightning_pipe.strategy.plans import plan_report
from lightning_pipe.strategy.plans.plan_report import make_room
from lightning_pipe.strategy.ranks.connections import join_ranks
from lightning_pipe.strategy.ranks.openmp import release_threads
from ranks.world import Died, Raised, World
from strategy.fits import dapple, make_trainer

SOON = 60.0  # seconds; the default deadline is 300


class Two(pl.LightningModule):
    """Two layers; fails on rank 1 where it is told to."""

    def __init__(self, fails: str = "", layers: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        self.fails = fails

    def fail(self, where: str) -> None:
        if self.fails == where and self.trainer.strategy.cluster_environment.global_rank() == 1:
            raise ZeroDivisionError("the user's mistake")

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.fail("training_step")
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.fail("validation_step")
        self.log("validation", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Does(pl.Callback):
    """Do something after the second batch, on one rank."""

    def __init__(self, what: str, rank: int = 0) -> None:
        self.what, self.rank = what, rank

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx != 1 or trainer.global_rank != self.rank:
            return
        if self.what == "fails twice":
            raise ValueError("the user's mistake")
        match self.what:
            case "saves":
                trainer.save_checkpoint(Path(tempfile.mkdtemp(), "unused.ckpt"))
            case "stops the training":
                trainer.should_stop = True
            case "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "is terminated":
                signal.raise_signal(signal.SIGTERM)
            case "never returns":
                threading.Event().wait()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank == self.rank and self.what == "ends its epoch":
            raise StopIteration

    def on_exception(self, trainer, module, exception):
        if self.what == "fails twice" and trainer.global_rank == self.rank:
            raise ZeroDivisionError("in a hook")


def loader(samples: int = 32) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples, 4)), 8)


def fit(module: pl.LightningModule, *callbacks: pl.Callback, **options: Any) -> None:
    trainer = make_trainer(
        dapple(**{"layout": "1-1", "microbatches": 2, **options}), max_epochs=1, callbacks=list(callbacks)
    )
    trainer.fit(module, loader(), loader())


def fit_doing(what: str, rank: int, options: dict[str, Any]) -> None:
    fit(Two(), Does(what, rank), **options)


class Prepared(Two):
    """Two layers with a hook that may prepare the step, so that errors before training may be due to it."""

    def on_train_start(self) -> None:
        pass


class Late(Two):
    """Two layers whose step needs what a hook makes: the error before training is that of all ranks."""

    def on_train_start(self) -> None:
        self.scale = 2.0

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.scale * super().training_step(batch, batch_idx)


def fit_late() -> int:
    trainer = make_trainer(dapple(layout="1-1", microbatches=2), max_epochs=1)
    trainer.fit(Late(), loader())
    return int(trainer.global_step)


def test_a_step_that_a_hook_prepares_is_planned_after_the_hook_on_all_ranks():
    assert World(2).run(fit_late, deadline_s=SOON) == [4, 4]


def fit_failing(where: str, kind: type[Two]) -> None:
    fit(kind(where))


@pytest.mark.parametrize(
    ("where", "kind"), [("training_step", Two), ("training_step", Prepared), ("validation_step", Two)]
)
def test_an_error_in_a_step_of_one_rank_comes_first_wherever_it_is_captured(where: str, kind: type[Two]):
    first, second = World(2).results(fit_failing, where, kind, deadline_s=SOON)
    assert isinstance(second, Raised) and "the user's mistake" in second.text, second
    assert isinstance(first, Raised) and "the user's mistake" in first.text and "Rank 1 failed" in first.text, first


@pytest.mark.parametrize(
    "what", ["saves", "stops the training", pytest.param("ends its epoch", marks=pytest.mark.slow)]
)
def test_what_all_ranks_must_do_is_missed_at_once_where_one_does_it(what: str):
    for result in World(2).results(fit_doing, what, 0, {}, deadline_s=SOON):
        assert isinstance(result, Raised)
        assert "Ranks wait for different things" in result.text and "is_global_zero" in result.text, result.text


def test_an_error_is_told_although_a_hook_at_exceptions_fails_too():
    first, second = World(2).results(fit_doing, "fails twice", 1, {}, deadline_s=SOON)
    assert isinstance(second, Raised) and "in a hook" in second.text, second
    assert isinstance(first, Raised) and "ValueError: the user's mistake" in first.text, first


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_ends_all_and_is_named(rank: int):
    results = World(2).results(fit_doing, "is stopped", rank, {"deadline_s": 10.0}, deadline_s=SOON)
    stopped, other = results[rank], results[1 - rank]
    assert isinstance(stopped, Died) and stopped.exitcode == -signal.SIGKILL
    assert isinstance(other, Raised) and f"Rank {rank} failed outside a program" in other.text, other
    assert "stopped (SIGSTOP)" in other.text


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_hook_is_named_with_its_last_instruction():
    killed, other = World(2).results(fit_doing, "is killed", 0, {}, deadline_s=SOON)
    assert isinstance(killed, Died) and isinstance(other, Raised)
    assert "Rank 0 died outside a program, after " in other.text and "of step 1" in other.text, other.text


@pytest.mark.slow
def test_a_hook_that_never_returns_does_not_keep_its_process():
    stuck, other = World(2).results(fit_doing, "never returns", 0, {"deadline_s": 5.0}, deadline_s=SOON)
    assert isinstance(other, Raised) and "Rank 1 waits for" in other.text
    assert isinstance(stuck, Died) and "Rank 0 is ended outside a program" in stuck.stderr


class Records(logging.Handler):
    """Keep what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def fit_terminated() -> str:
    records = Records()
    logging.getLogger("lightning_pipe").addHandler(records)
    try:
        fit(Two(), Does("is terminated", 1))
    except (SystemExit, PipelineError) as error:
        told = [text for text in records.texts if "SIGTERM" in text]
        return f"{type(error).__name__} {error} {told}"
    finally:
        logging.getLogger("lightning_pipe").removeHandler(records)
    return "went on"


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_before_the_next_batch():
    other, terminated = World(2).run(fit_terminated, deadline_s=SOON)
    assert terminated.startswith("SIGTERMException") and "SIGTERMException" in other, (other, terminated)
    assert "Rank 1 received SIGTERM; all ranks stop after " in terminated, terminated


def held_after(fits: int) -> list[tuple[int, int]]:
    """Return descriptors and threads after every fit; the third fails on one rank."""
    found = []
    for number in range(fits):
        try:
            fit(Two(), *([FailsAtEnd()] if number == 2 else []))
        except (ZeroDivisionError, PipelineError):
            assert number == 2
        for closing in [thread for thread in threading.enumerate() if thread.name == "closing"]:
            closing.join(SOON)  # of the failed fit, whose connections nobody waits for
        found.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return found


class FailsAtEnd(pl.Callback):
    def on_validation_end(self, trainer, module):
        if trainer.global_rank == 1:
            raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
def test_fits_leave_no_descriptors_and_no_threads():
    for found in World(2).run(held_after, 5, deadline_s=2 * SOON):
        (before, threads), (after, later) = found[1], found[-1]
        assert after <= before, found
        assert later - threads < len(found) - 2, f"a thread stays of every fit, or is about to end: {found}"


def save_after_fit(path: str) -> list[str]:
    module = Two()
    trainer = make_trainer(dapple(layout="1-1", microbatches=2), max_epochs=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    return [name for name, value in saved["state_dict"].items() if torch.equal(value, module.state_dict()[name])]


def test_checkpoints_are_saved_after_a_fit_has_closed_its_connections(tmp_path: Path):
    names = [f"net.{layer}.{kind}" for layer in range(2) for kind in ("weight", "bias")]
    assert World(2).run(save_after_fit, str(tmp_path / "a.ckpt"), deadline_s=SOON) == [names, names]


def alone(rank: int) -> GuardedWatch:
    guard, patience = GuardClient(), patience_until(5.0)
    guard.begin(rank, patience.limits)
    return GuardedWatch(guard, rank=rank, ranks=2, patience=patience)


def test_a_rank_that_never_comes_is_named(unused_port: int):
    watch = alone(0)
    with pytest.raises(PipelineError, match=r"Of 2 ranks, rank 1 did not come .* within 5 s.*num_nodes"):
        join_ranks(watch, address="127.0.0.1", port=unused_port)
    watch.close()


@pytest.mark.slow
def test_a_first_rank_that_never_comes_is_named(unused_port: int):
    watch = alone(1)
    with pytest.raises(PipelineError, match=r"Rank 0, which hosts it, has not come"):
        join_ranks(watch, address="127.0.0.1", port=unused_port)
    watch.close()


def fork_after_computing() -> int:
    """Compute on several threads, in this process and in a forked one; return the exit code of that."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    square = torch.ones(1024, 1024)
    assert float((square @ square)[0, 0]) == 1024
    release_threads()
    child = os.fork()
    if not child:
        os._exit(int(float((square @ square)[0, 0]) != 1024))
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        torch.set_num_threads(threads)


def test_a_forked_process_computes_on_several_threads_after_its_parent_has():
    assert World(1).run(fork_after_computing, deadline_s=SOON) == [0]


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("option", ["report", "trace"])
def test_a_report_that_cannot_be_written_is_refused_before_training(option: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"found {option}='.*file/under.*nothing can be written"):
        make_room(read_config({option: str(tmp_path / "file" / "under" / "it")}))
    make_room(read_config({option: str(tmp_path / "new" / "it")}))


def advice_of(layers: int, batch_dim: int) -> str:
    """Return what rank 0 says of the plan of two stages."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_report, "rank_zero_info", told.append)
        trainer = make_trainer(dapple(layout="1-1", microbatches=1, batch_dim=batch_dim), max_epochs=1)
        trainer.fit(Two(layers=layers), loader())
    return " ".join(told)


def test_stages_without_work_are_told():
    first, _ = World(2).run(advice_of, 1, 0, deadline_s=SOON)
    assert "next to nothing" in first and "Without layout the planner uses fewer" in first, first
    first, _ = World(2).run(advice_of, 2, 1, deadline_s=SOON)
    assert "or samples do not lie along batch_dim" in first, first
    first, _ = World(2).run(advice_of, 8, 0, deadline_s=SOON)
    assert "next to nothing" not in first, first


def fit_with_failing_profiler(folder: str) -> bool:
    """Measure memory with a profiler that fails once in this step."""
    events, failures = allocations.recorded_events, [MemoryError("std::bad_alloc")]

    def recorded(finished: Any) -> Any:
        if failures:
            raise failures.pop()
        return events(finished)

    strategy = dapple(layout="1-1", microbatches=2, memory=True, report=folder)
    allocations.recorded_events = recorded
    try:
        trainer = make_trainer(strategy, max_epochs=2)
        trainer.fit(Two(), loader())
    finally:
        allocations.recorded_events = events
    return dist.get_rank() != 0 or Path(folder, "plan.yaml").exists()


def test_a_profiler_that_fails_ends_no_training(tmp_path: Path):
    assert World(2).run(fit_with_failing_profiler, str(tmp_path), deadline_s=SOON) == [True, True]


def warnings_of_full_disk(folder: str) -> list[str]:
    full = {option: str(Path(folder, f"{option}.html")) for option in ("report", "trace")}
    with warnings.catch_warnings(record=True) as seen:
        trainer = make_trainer(dapple(layout="1-1", microbatches=2, **full), max_epochs=2)
        warnings.simplefilter("always")
        trainer.fit(Two(), loader())
    return [str(warning.message) for warning in seen if "goes on" in str(warning.message)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk is a device of Linux")
def test_a_full_disk_under_a_report_ends_no_training_and_is_told_with_the_path(tmp_path: Path):
    """It ended the training, with an OSError that has no file name."""
    for option in ("report", "trace"):
        (tmp_path / f"{option}.html").symlink_to("/dev/full")
    first, second = World(2).run(warnings_of_full_disk, str(tmp_path), deadline_s=SOON)
    assert len(first) == 2 and second == [], (first, second)
    for option, text in zip(("trace", "report"), first, strict=True):
        assert f"{option}={str(tmp_path / option) + '.html'!r} asks for cannot be written" in text
