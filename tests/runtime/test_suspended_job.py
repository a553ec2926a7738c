"""Time in which a shell has suspended the whole job (its ranks and their guards) counts for no deadline."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from lightning_pipe.runtime.guard import guarded_watch, process
from lightning_pipe.runtime.guard.failure import INSIDE
from lightning_pipe.runtime.guard.guarded_watch import GuardedWatch
from lightning_pipe.runtime.guard.page import SharedPage
from lightning_pipe.runtime.guard.process import RankGuard
from lightning_pipe.runtime.guard.watch import OverdueError, Patience
from lightning_pipe.runtime.waiting import Done, Wait
from runtime.guards import Told

DEADLINE_S = 300.0  # of `Patience` and of guards
LOOK_S = 0.5


class Guard:
    """The guard of a rank in this process, whose clock a test moves."""

    def __init__(self) -> None:
        self.page, self.now = SharedPage(), time.monotonic()
        ends = socket.socketpair()
        self.ends, self.guard = ends, RankGuard(os.getppid(), ends[0], self.page)

    def write(self) -> None:
        """Let the rank begin an instruction with the usual limit."""
        self.page.write(INSIDE, 3, b"0F1", limit=self.now + DEADLINE_S)

    def look_after(self, seconds: float) -> None:
        self.now += seconds
        self.page.beat()
        self.guard._pass(self.now)

    def has_failed_after(self, seconds: float) -> bool:
        """Look again and again for so long, or until the rank has failed."""
        looks = (self.look_after(LOOK_S) for _ in range(round(seconds / LOOK_S)))
        return any(self.guard._failure is not None for _ in looks)


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    monkeypatch.setattr(process, "kill", None)  # of the parent of this process
    guard = Guard()
    yield guard
    for end in guard.ends:
        end.close()


@pytest.mark.parametrize("is_seen", [True, False], ids=["a limit that was seen", "a limit just written"])
def test_a_limit_is_met_by_the_time_in_which_the_job_runs(guard: Guard, is_seen: bool) -> None:
    guard.look_after(LOOK_S)
    guard.write()
    if is_seen:
        guard.look_after(LOOK_S)
    guard.look_after(10 * DEADLINE_S)
    assert not guard.has_failed_after(DEADLINE_S - 3.0)
    assert guard.has_failed_after(6.0), "it is still there"


def test_a_limit_that_is_written_again_begins_again(guard: Guard) -> None:
    for _ in range(3):
        guard.write()
        assert not guard.has_failed_after(DEADLINE_S - 3.0)


class Sleeps:
    """A handle with which the job is suspended once, and then waits for so long."""

    def __init__(self, seconds: float) -> None:
        self.now, self.left, self.suspended = 0.0, seconds, 10 * DEADLINE_S

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout_s: float) -> bool:
        self.now, self.suspended = self.now + timeout_s + self.suspended, 0.0
        self.left -= timeout_s
        return self.left < 0

    def landed(self) -> bool:
        return self.left < 0


def test_a_wait_lasts_as_long_as_the_job_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = GuardedWatch(Told(), rank=0, ranks=2, patience=Patience(DEADLINE_S))  # type: ignore[arg-type]
    for seconds in (DEADLINE_S - 3.0, DEADLINE_S + 3.0):
        handle = Sleeps(seconds)
        monkeypatch.setattr(guarded_watch, "time", SimpleNamespace(monotonic=handle.monotonic))
        if seconds < DEADLINE_S:
            watch.wait(Wait(handle, "a sum"))
        else:
            with pytest.raises(OverdueError):
                watch.wait(Wait(handle, "a sum"))
    watch.wait(Wait(Done(), "a sum"))
