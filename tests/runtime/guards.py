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

    def where(self, ranks: Sequence[int]) -> dict[int, GuardedState]:
        return {rank: self.states[rank] for rank in ranks if rank in self.states}

    def fail(self, failure: Failure, *, wait_s: float) -> Failure:
        self.own.append(failure)
        return failure
