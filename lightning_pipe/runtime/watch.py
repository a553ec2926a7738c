"""Who looks after a rank that waits? A watch: deadlines, and the failures of other ranks.

`Unwatched` waits for ever; `store_watch.StoreWatch` is what a training uses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from lightning_pipe.core.program import Instruction
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.waiting import Wait

POLL_S = 0.2  # how often a waiting rank looks up


class Watch(Protocol):
    """Look after one rank while it runs programs."""

    def program(self, step: int) -> AbstractContextManager[None]:
        """Surround one program; an exception that leaves it is told to the other ranks."""
        ...

    def at(self, instruction: Instruction) -> None:
        """Note the instruction that begins.

        Raises:
            PipelineError: if another rank has failed.
        """
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


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for what.

    Attributes:
        deadline_s: for a message or a sum.
        stale_s: for a sign of life of a peer that is inside a program.
        grace_s: for its own current instruction, once another rank has failed.
        beat_s: between two signs of life.
        parting_s: for the other ranks to read of its failure.
    """

    deadline_s: float = 300.0
    stale_s: float = 15.0
    grace_s: float = 5.0
    beat_s: float = 1.0
    parting_s: float = 3.0


PATIENCE = Patience()


class PeerFailure(PipelineError):
    """Report, on a rank that is well, the failure of another one."""
