"""What an uncaught error prints: lines of the user's code on the rank that raised it, and one line on every other rank.

Ranks print to one terminal, and each of them ends by the failure of one. A traceback of every rank, through Lightning,
torch and this package, would hide the line of the user's code that matters.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from lightning_pipe.capture.python.users_code import is_library
from lightning_pipe.errors import PipeError
from lightning_pipe.runtime.guard.watch import PeerFailure

_VARIABLE = "LIGHTNING_PIPE_TRACEBACK"  # "full": every frame, on every rank
_ORIGIN = "_raised_on_rank"
_FRAME = re.compile(r'^  File "(.+?)", line .*\n?(?:    .*\n?)*', re.MULTILINE)
_Hook = Callable[[type[BaseException], BaseException, types.TracebackType | None], Any]


def raised_on(error: Exception, rank: int) -> Exception:
    """Note that an error, which this rank raises too, was first raised on another one; return it."""
    setattr(error, _ORIGIN, rank)
    return error


def show_errors(*, rank: int, ranks: int) -> None:
    """Have errors that nobody catches printed briefly from now on, unless a program or debugger has its own way.

    Args:
        rank: this one.
        ranks: number of all ranks; a single one has no number before its lines.
    """
    present: _Hook = sys.excepthook
    if isinstance(present, _Brief):
        present = present.whole
    if present is sys.__excepthook__ or _is_torchs(present):
        prefix = f"[rank{rank}] " if ranks > 1 else ""
        sys.excepthook = _Brief(present, prefix)


def _is_torchs(hook: _Hook) -> bool:
    return getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d"


class _Brief:
    """A hook for uncaught errors.

    Args:
        whole: the hook that prints everything.
        prefix: before the only line of a rank on which another one's error is raised.
    """

    def __init__(self, whole: _Hook, prefix: str) -> None:
        self.whole, self._prefix = whole, prefix

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        """Print an error."""
        if os.environ.get(_VARIABLE) == "full" or issubclass(kind, (KeyboardInterrupt, SystemExit)):
            self.whole(kind, error, trace)
            return
        if (text := _of_another_rank(error)) is not None:
            sys.stderr.write(f"{self._prefix}stopped. {text}\n")
        else:
            shown = traceback.TracebackException(kind, error, trace)
            hidden = _hide_libraries(shown, is_ours=isinstance(error, PipeError))
            sys.stderr.write("".join(shown.format()))
            if hidden:
                sys.stderr.write(f"({hidden} frames of libraries are hidden; {_VARIABLE}=full shows them.)\n")
        sys.stderr.flush()


def _of_another_rank(error: BaseException) -> str | None:
    """Return the failure of another rank, with the user's lines that it names; None if this one has failed."""
    if isinstance(error, PeerFailure):
        return _FRAME.sub(lambda frame: "" if is_library(frame[1]) else frame[0], str(error))
    origin = getattr(error, _ORIGIN, None)
    return None if origin is None else f"Rank {origin} failed: {type(error).__name__}: {error}"


def _hide_libraries(shown: traceback.TracebackException, *, is_ours: bool) -> int:
    """Leave out frames of libraries from an error and those behind it, where frames of the user's remain.

    Args:
        shown: the error; is changed.
        is_ours: whether it is one of this package, whose text says all: then no frame of a library remains. Otherwise
            the innermost one does, where it says in which function of a library the error was raised.

    Returns:
        How many frames were left out.
    """
    users = [frame for frame in shown.stack if not is_library(frame.filename)]
    hidden = 0
    if users:
        last = shown.stack[-1]
        remaining = users if is_ours or last in users else [*users, last]
        hidden = len(shown.stack) - len(remaining)
        shown.stack = traceback.StackSummary.from_list(remaining)
    for behind in (shown.__cause__, None if shown.__suppress_context__ else shown.__context__):
        if behind is not None:
            hidden += _hide_libraries(behind, is_ours=False)
    return hidden
