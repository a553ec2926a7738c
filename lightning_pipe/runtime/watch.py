"""Who looks after a rank that waits? A watch: deadlines, and failures of other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from lightning_pipe.core.program import Instruction
from lightning_pipe.runtime.waiting import Wait

POLL_S = 0.2  # how often a waiting rank looks up


class Watch(Protocol):
    """Look after one rank while it runs programs."""

    def program(self, step: int) -> AbstractContextManager[None]:
        """Surround one program; an exception that leaves it is told to the other ranks."""
        ...

    def at(self, instruction: Instruction) -> None:
        """Note the instruction that begins."""
        ...

    def wait(self, wait: Wait) -> None:
        """Wait for a handle.

        Raises:
            PipelineError: if it takes too long, or another rank has failed.
        """
        ...


class Unwatched:
    """Wait for ever."""

    @contextmanager
    def program(self, step: int) -> Iterator[None]:
        """Do nothing."""
        yield

    def at(self, instruction: Instruction) -> None:
        """Do nothing."""

    def wait(self, wait: Wait) -> None:
        """Wait as long as it takes."""
        while not wait.handle.wait(POLL_S):
            pass
