"""Watch over a waiting rank: deadlines, and the failures of other ranks.

`Unwatched` waits for ever; `guarded_watch.GuardedWatch` is what a training uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from lightning_pipe.core.program import Instruction
from lightning_pipe.errors import PipelineError
from lightning_pipe.runtime.guard.process import GuardTimeouts
from lightning_pipe.runtime.waiting import Wait

POLL_S = 0.2  # how often a waiting rank looks up


class Watch(Protocol):
    """Look after one rank while it runs programs."""

    def program(self, step: int) -> AbstractContextManager[None]:
        """Surround one program; an exception that leaves it is told to the other ranks."""
        ...

    def at(self, instruction: Instruction, *, pending: bool = False) -> None:
        """Note the instruction that begins.

        Args:
            instruction: the instruction.
            pending: whether transfers or sums of this rank are under way: then other ranks wait for it, and it is
                overdue at the deadline even if it never looks up (a host that spins inside of CUDA seems to work).

        Raises:
            PipelineError: if another rank has failed.
        """
        ...

    def raise_failure(self) -> None:
        """Look whether a rank has failed: what was received since then may be rubbish.

        Raises:
            PipelineError: if one has.
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

    @contextmanager
    def opening(self, what: str) -> Iterator[None]:
        """Do nothing."""
        yield

    @contextmanager
    def limited(self, what: str) -> Iterator[None]:
        """Do nothing."""
        yield

    def watch_processes(self, pids: Sequence[int]) -> None:
        """Do nothing."""

    def hear(self) -> None:
        """Do nothing."""

    def meet(self, words: str, *, patience_s: float) -> str:
        """Meet nobody: there is no other rank."""
        return ""

    def at(self, instruction: Instruction, *, pending: bool = False) -> None:
        """Do nothing."""

    def raise_failure(self) -> None:
        """Do nothing: there is no other rank."""

    def wait(self, wait: Wait) -> None:
        """Wait as long as it takes."""
        while not wait.handle.wait(POLL_S):
            pass


@dataclass(frozen=True)
class Patience:
    """How long a rank waits for what, in seconds.

    Attributes:
        deadline_s: for a message, a sum, a connection, or a batch.
        stale_s: for a sign of life of a rank that is inside a program, and of a host.
        grace_s: for a rank to come out of its current instruction, once another rank has failed.
        parting_s: for the failure behind an error that looks like the consequence of one.
    """

    deadline_s: float = 300.0
    stale_s: float = 15.0
    grace_s: float = 5.0
    parting_s: float = 3.0

    @property
    def limits(self) -> GuardTimeouts:
        """Return what the guard keeps to."""
        return GuardTimeouts(self.deadline_s, self.stale_s, self.grace_s)


def patience_until(deadline_s: float) -> Patience:
    """Return how long a rank waits for what, given the deadline: silence is noticed in half of it at the latest."""
    return Patience(deadline_s, stale_s=min(Patience.stale_s, deadline_s / 2))


PATIENCE = Patience()


class PeerFailure(PipelineError):
    """Report, on a rank that is well, the failure of another one."""


class OverdueError(PipelineError):
    """Report a wait that took longer than the deadline."""


class MismatchError(PipelineError):
    """Report ranks that wait for different things which all of them must do together."""

    @classmethod
    def of(cls, waits: str) -> MismatchError:
        """Return the error that says what each rank waits for."""
        return cls(
            f"Ranks wait for different things, so none of them can go on: {waits}. Something that all ranks must do "
            "together (trainer.save_checkpoint, trainer.strategy.barrier, a validation, setting trainer.should_stop) "
            "was done on some of them only, as under `if trainer.is_global_zero:`; or an epoch was left on some "
            "only (a hook raised StopIteration, or returned -1). Do it on every rank; what is written to files is "
            "written once."
        )
