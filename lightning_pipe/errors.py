"""Name every mistake a user can make, so that programs and tests can tell them apart.

Every text says what was found, what was expected and what to do. `assert` is kept for what cannot happen.

An error that is raised inside the user's step must end it, although the step may catch exceptions of all kinds: on one
device there would have been none, so what the step does then is not what it does there.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from contextvars import ContextVar

_MADE: ContextVar[list[Exception] | None] = ContextVar("errors that were made inside the user's step", default=None)


def remember(error: Exception) -> None:
    """Keep an error that must end the user's step, if it is made inside one."""
    if (made := _MADE.get()) is not None:
        made.append(error)


@contextlib.contextmanager
def none_caught() -> Iterator[None]:
    """Run the user's step inside; raise the first error of this package that was made there, should it be caught."""
    made: list[Exception] = []
    token = _MADE.set(made)
    try:
        yield
    except Exception:
        if made:
            raise made[0]  # noqa: B904 - with the cause that it has
        raise
    finally:
        _MADE.reset(token)
    if made:
        raise made[0]


class PipeError(Exception):
    """Base of every error that this package raises on purpose."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        remember(self)


class ConfigError(PipeError, ValueError):
    """Report an option that is unknown, of the wrong type or out of range."""


class PlanError(PipeError, ValueError):
    """Report a plan that cannot be read, or does not fit the graph, the ranks or the batch."""


class FewPlacesError(PlanError):
    """Report a graph that can be cut at fewer places than stages are wanted."""


class ClusterError(PipeError, ValueError):
    """Report a cluster file that cannot be read, or does not fit the ranks."""


class ProfileError(PipeError, ValueError):
    """Report a published profile that cannot be read."""


class CheckpointError(PipeError, ValueError):
    """Report a checkpoint that cannot be read or written, by its path."""


class ProgramError(PipeError, ValueError):
    """Report a program (or its text) that breaks a law that `schedule.verification.verify` checks."""


class CaptureError(PipeError):
    """Report a step that cannot be turned into a graph, with the hazard and the user's line."""


class StepError(CaptureError):
    """Report a step that raises an error of its own, before any question of a graph.

    Args:
        said: what it raises, and where.
        advice: what may help.
    """

    def __init__(self, said: str, advice: str = "") -> None:
        super().__init__(f"{said} {advice}".strip())
        self.said = said


class ChangedStateError(CaptureError):
    """Report a step that changes state which it reads again in its next call.

    Attributes:
        state: name of the state, as `self.count`.
    """

    state = ""


class UncapturedError(CaptureError):
    """Report a step that no route can hold, on every rank."""


class BrokenRouteError(PipeError):
    """Report a captured step that cannot be made ready to run for a fault of this package; another route may run it."""


@contextlib.contextmanager
def faults_reported(what: str) -> Iterator[None]:
    """Report what is raised inside as a fault of this package, unless it is the user's mistake or the machine's.

    Args:
        what: what is made inside.

    Raises:
        BrokenRouteError: with the place of the fault.
    """
    try:
        yield
    except Exception as fault:
        is_program = isinstance(fault, ProgramError)
        if isinstance(fault, PipeError | OSError | MemoryError) and not is_program:
            raise
        place = traceback.extract_tb(fault.__traceback__)[-1]
        raise BrokenRouteError(
            f"{what} cannot be made ({type(fault).__name__}: {fault} at {place.filename}:{place.lineno} in "
            f"{place.name}); please report this as a bug"
        ) from fault


class FewSamplesError(CaptureError):
    """Report a step that runs with a whole batch, and not with some of its samples."""


class BatchError(PipeError, ValueError):
    """Report a batch that cannot be cut into micro-batches."""


class UnsupportedError(PipeError):
    """Report a feature of the trainer or the module that this strategy refuses, before training starts."""


class PipelineError(PipeError, RuntimeError):
    """Report a failure while a program runs: rank, instruction and cause."""


class InstructionError(PipelineError):
    """Report what an instruction raised: its words, behind the rank and the instruction."""


class OutOfMemoryError(PipelineError):
    """Report that a rank needs more memory than it may take: rank, instruction, and what would help.

    Attributes:
        is_complete: whether what was foreseen for the rank is said too.
    """

    is_complete = False


class ShortageError(PipelineError):
    """Report that this process, or its user, has no more file descriptors, threads or memory to start something."""


class AbsentError(PipeError, RuntimeError):
    """Report code that reads or writes values on a rank that does not have them."""
