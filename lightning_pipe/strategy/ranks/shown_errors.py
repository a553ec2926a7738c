"""What an uncaught error prints: lines of the user's code on the rank that raised it, and one line on every other rank.

Ranks print to one terminal, and each of them ends by the failure of one. A traceback of every rank, through Lightning,
torch and this package, would hide the line of the user's code that matters. The launcher of torch prints a summary
behind all of that; it repeats what ranks have written to the files that it names in `TORCHELASTIC_ERROR_FILE`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lightning_pipe.capture.python.users_code import is_library
from lightning_pipe.errors import PipeError, UnsupportedError
from lightning_pipe.runtime.guard.watch import PeerFailure

_VARIABLE = "LIGHTNING_PIPE_TRACEBACK"  # "full": every frame, on every rank
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_ORIGIN = "_raised_on_rank"
_FRAME = re.compile(r'^  File "(.+?)", line (\d+), in (.*)\n?(?:    .*\n?)*', re.MULTILINE)
_Hook = Callable[[type[BaseException], BaseException, types.TracebackType | None], Any]
_Error = TypeVar("_Error", bound=BaseException)


def raised_on(error: _Error, rank: int) -> _Error:
    """Note that an error, which this rank raises too, was first raised on another one; return it."""
    setattr(error, _ORIGIN, rank)
    return error


def origin_of(error: BaseException) -> int | None:
    """Return the other rank that has raised an error first, as far as that was noted."""
    origin: int | None = getattr(error, _ORIGIN, None)
    return origin


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
        sys.excepthook = _Brief(present, rank, ranks)


def tell_launcher(error: BaseException, *, rank: int, ranks: int) -> None:
    """Write an error to the file whose text the launcher of torch shows at the end, if it has started this rank.

    It shows the earliest error as the root cause, by whole seconds: one of another rank is dated later.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path or isinstance(error, (KeyboardInterrupt, SystemExit)):
        return
    dated = math.ceil(time.time()) if _of_another_rank(error) else int(time.time())
    extra = {"py_callstack": _text(error, rank, ranks).rstrip(), "timestamp": str(dated)}
    content = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}
    with contextlib.suppress(OSError):  # the terminal has the error too
        Path(path).write_text(json.dumps(content), encoding="utf-8")


def _is_torchs(hook: _Hook) -> bool:
    return getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d"


class _Brief:
    """A hook for uncaught errors.

    Args:
        whole: the hook that prints everything.
        rank: this one.
        ranks: number of all ranks.
    """

    def __init__(self, whole: _Hook, rank: int, ranks: int) -> None:
        self.whole, self._rank, self._ranks = whole, rank, ranks

    def __call__(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        """Print an error."""
        if os.environ.get(_VARIABLE) == "full" or issubclass(kind, (KeyboardInterrupt, SystemExit)):
            self.whole(kind, error, trace)
            return
        sys.stderr.write(_text(error, self._rank, self._ranks))
        sys.stderr.flush()
        tell_launcher(error, rank=self._rank, ranks=self._ranks)


def _text(error: BaseException, rank: int, ranks: int) -> str:
    """Return what is shown of an error on this rank: a line where another rank shows it whole."""
    prefix = f"[rank{rank}] " if ranks > 1 else ""
    if (text := _of_another_rank(error)) is not None:
        return f"{prefix}stopped. {text}\n"
    if rank > 0 and isinstance(error, UnsupportedError):  # which rank 0 shows, before training starts
        return f"{prefix}stopped. {type(error).__name__}: {error}\n"
    shown = traceback.TracebackException(type(error), error, error.__traceback__)
    hidden = _hide_libraries(shown, is_ours=isinstance(error, PipeError))
    advice = f"({hidden} frames of libraries are hidden; {_VARIABLE}=full shows them.)\n" if hidden else ""
    return "".join(shown.format()) + advice


def _of_another_rank(error: BaseException) -> str | None:
    """Return the failure of another rank, with the user's line that it names; None if this one has failed."""
    if not isinstance(error, PeerFailure):
        origin = origin_of(error)
        return None if origin is None else f"Rank {origin} failed: {type(error).__name__}: {error}"
    text = str(error)
    first, *others = _FRAME.sub("", text).splitlines()
    places = [f" ({file}:{line} in {name})" for file, line, name in _FRAME.findall(text) if not is_library(file)]
    left = [line for line in others if line not in first and not line.startswith("Traceback (most recent")]
    return "\n".join([first + "".join(places[-1:]), *left])


def _hide_libraries(shown: traceback.TracebackException, *, is_ours: bool) -> int:
    """Leave out frames of libraries from an error and those behind it, where the user's or its own text say enough.

    Args:
        shown: the error; is changed.
        is_ours: whether it is one of this package, whose text says all: then no frame of a library remains. Otherwise
            the innermost one does, where it says in which function of a library the error was raised.

    Returns:
        How many frames were left out.
    """
    users = [frame for frame in shown.stack if not is_library(frame.filename)]
    hidden = 0
    if users or is_ours:
        last = shown.stack[-1]
        remaining = users if is_ours or last in users else [*users, last]
        hidden = len(shown.stack) - len(remaining)
        shown.stack = traceback.StackSummary.from_list(remaining)
    for behind in (shown.__cause__, None if shown.__suppress_context__ else shown.__context__):
        if behind is not None:
            hidden += _hide_libraries(behind, is_ours=False)
    return hidden
