"""Where a process can open or start no more, the start ends at once, with the limit and what to do."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.errors import PipelineError, ShortageError
from lightning_pipe.runtime.guard.client import GuardClient
from lightning_pipe.runtime.shortages import shortages_named
from lightning_pipe.strategy.ranks import connections
from lightning_pipe.strategy.ranks.launchers import GuardedScriptLauncher
from ranks.world import Raised, World
from slow import slow_but
from strategy.fits import dapple, make_trainer
from strategy.test_data import alone as feed_of_one_rank
from strategy.test_deaths import alone as watch_of_rank

resource = pytest.importorskip("resource")
DEADLINE_S = 60.0


class FilesLeft:
    """Let this process open so many files more, inside."""

    def __init__(self, number: int) -> None:
        self.number, self.limits = number, resource.getrlimit(resource.RLIMIT_NOFILE)

    def __enter__(self) -> None:
        free = (number for number in itertools.count() if not is_open(number))
        resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, self.number, None)), self.limits[1]))

    def __exit__(self, *_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self.limits)


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_with_few_files(left: int) -> None:
    trainer = make_trainer(dapple(layout="1-1", microbatches=2, deadline_s=DEADLINE_S), max_epochs=1)
    with FilesLeft(left):
        trainer.fit(Net(), DataLoader(torch.ones(8, 4), 4))


@pytest.mark.parametrize("left", slow_but([12], [4, 12, 24]))
def test_ranks_without_descriptors_end_before_the_deadline_and_name_the_limit(left: int) -> None:
    begin = time.monotonic()
    results = World(2).results(fit_with_few_files, left)
    assert time.monotonic() - begin < DEADLINE_S / 2
    for result in results:
        assert isinstance(result, Raised) and result.kind == "ShortageError"
        assert "open files (`ulimit -n`)" in result.text and "Raise that" in result.text


def test_a_rank_that_cannot_look_for_the_first_one_says_so_at_once() -> None:
    begin = time.monotonic()
    with contextlib.closing(watch_of_rank(1)) as watch:  # or its guard would end this process at the deadline
        with pytest.raises(OSError, match="Too many open files"), FilesLeft(0):
            connections.join_ranks(watch, address="127.0.0.1", port=1)
        assert time.monotonic() - begin < watch.patience.deadline_s


def raising(error: Exception) -> Callable[..., Any]:
    def start(*_: Any, **__: Any) -> None:
        raise error

    return start


NO_THREAD, NO_PROCESS = RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "no process")


@pytest.mark.parametrize(
    ("owner", "name", "error", "words"),
    [
        (threading.Thread, "start", NO_THREAD, "`ulimit -u`"),
        (subprocess.Popen, "_execute_child", NO_PROCESS, "`ulimit -u`"),
        (subprocess.Popen, "_execute_child", OSError(errno.ENOMEM, "no memory"), "`ulimit -v`"),
        (socket, "socketpair", OSError(errno.EMFILE, "no files"), "`ulimit -n`"),
    ],
)
def test_a_guard_that_cannot_start_names_the_limit(
    owner: Any, name: str, error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, raising(error))
    with pytest.raises(ShortageError, match=words), shortages_named("Rank 0"):
        GuardClient()


def test_a_loader_without_workers_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.popen_fork.Popen._launch", raising(NO_PROCESS))
    loader = DataLoader(torch.ones(8, 4), 4, num_workers=1)
    with pytest.raises(ShortageError, match=r"A loader of rank 0 cannot start.*`ulimit -u`"):
        feed_of_one_rank().wrap(loader).open()


def test_other_errors_are_left_as_they_are() -> None:
    refused, locked = OSError(errno.ECONNREFUSED, "nobody listens"), BlockingIOError(errno.EAGAIN, "a lock")
    for error in (refused, locked, PipelineError("x")):
        with pytest.raises(type(error)) as caught, shortages_named("Rank 0"):
            raise error
        assert caught.value is error


def test_ranks_that_were_started_end_where_another_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    started = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)]
    launcher = GuardedScriptLauncher(
        LightningEnvironment(), 3, 1, begin=raising(AssertionError()), check=raising(AssertionError())
    )
    launcher.procs = started
    monkeypatch.setattr(subprocess.Popen, "_execute_child", raising(NO_PROCESS))
    monkeypatch.setattr(launcher, "_call_children_scripts", lambda: subprocess.Popen("rank"))
    with pytest.raises(ShortageError, match="A rank of this host cannot start"):
        launcher._start_ranks()
    assert started[0].wait(DEADLINE_S) < 0
    started[0].stdin.close()


def connect_after_failing() -> str:
    """Fail to open connections, and try again in the next session of the same guard; return what that says."""
    watch = watch_of_rank(0)
    watch.guard.has_met = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "process_group_transport", raising(RuntimeError("connection closed")))
        for _ in range(2):
            watch.guard.begin(0, watch.patience.limits)
            with pytest.raises(RuntimeError) as caught:
                connections.connect_ranks(watch, device=torch.device("cpu"))
    watch.close()
    return str(caught.value)


def test_a_fit_after_one_that_could_not_connect_says_so() -> None:
    (said,) = World(1).run(connect_after_failing)
    assert "an earlier fit could not open the connections between ranks; start the script again" in said
