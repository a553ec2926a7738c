"""What stands for a guard, and handles, where a test decides what happens."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from lightning_pipe.runtime.guard.failure import Failure, GuardedState
from lightning_pipe.runtime.guard.page import SharedPage


class Never:
    """A handle of something that never comes."""

    def wait(self, timeout_s: float) -> bool:
        return threading.Event().wait(min(timeout_s, 0.05))

    def landed(self) -> bool:
        return False


class Told:
    """A guard that has told what a test wants."""

    def __init__(self) -> None:
        self.page, self.heard, self.session = SharedPage(), threading.Event(), 1
        self.failure: Failure | None = None
        self.states: dict[int, GuardedState] = {}
        self.own: list[Failure] = []
        self.unopened = ""

    def where(self, ranks: Sequence[int]) -> dict[int, GuardedState]:
        return {rank: self.states[rank] for rank in ranks if rank in self.states}

    def fail(self, failure: Failure, *, wait_s: float) -> Failure:
        self.own.append(failure)
        return failure


class Aborted:
    """A handle that counts as done as soon as a rank has failed: its communicator was aborted."""

    def __init__(self, guard: Told) -> None:
        self.guard = guard

    def wait(self, timeout_s: float) -> bool:
        self.guard.failure = Failure(1, "at 1F0 of step 7", "ValueError: user")
        return True

    def landed(self) -> bool:
        return True
