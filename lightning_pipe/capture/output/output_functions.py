"""Output functions: `print`, `self.print`, `logging`, `warnings.warn`, `tqdm.write`, `sys.stdout.write`.

While a step runs, what its code gives them is noted instead (`output_noted`): a step runs more often than once per
batch, and on every rank. `make_output` gives it to them after the batch.

Other threads, debuggers, and output of torch and Lightning themselves are left alone, as are log records and warnings
of other installed packages, which often come once per process.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import Any, Protocol
from unittest import mock

from lightning_pipe.capture.python.users_code import is_frameworks, is_installed, is_library
from lightning_pipe.lightning_names import pl

_PRINT = builtins.print
_HANDLE = logging.Logger.handle
_WARN = warnings.warn
_STREAMS = ("stdout", "stderr")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/cmd.py", "/ipdb/", "/pudb/", "/debugpy/", "/pydevd", "/IPython/")
_WRAPPERS = ("/rank_zero.py", "/tqdm/", "/rich/", "/click/")  # which output for their callers


class Note(Protocol):
    """Takes what the step gives to an output function: whose, its name, and the arguments."""

    def __call__(self, path: str, method: str, *args: Any, **kwargs: Any) -> None:
        """Note a call."""


@contextlib.contextmanager
def output_noted(note: Note) -> Iterator[None]:
    """Give `note` what code of a step in this thread gives to output functions."""
    functions = _Functions(note)
    with contextlib.ExitStack() as stack:
        for owner, name, function in functions.replacements():
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


class _Functions:
    """Functions that stand for output functions."""

    def __init__(self, note: Note) -> None:
        self._note, self._thread = note, get_ident()
        self._is_passing = False  # whether output of others is under way: it ends in streams
        self._streams = {name: getattr(sys, name) for name in _STREAMS}

    def replacements(self) -> Iterator[tuple[Any, str, Any]]:
        yield builtins, "print", self._print
        yield logging.Logger, "handle", self._handling()
        yield warnings, "warn", self._warn
        yield pl.LightningModule, "print", self._module_print()
        if (tqdm := sys.modules.get("tqdm.std")) is not None:
            yield tqdm.tqdm, "write", classmethod(self._tqdm_write(tqdm.tqdm.write))
        for name, stream in self._streams.items():
            yield sys, name, OutputStream(stream, f"sys.{name}", self)

    def notes(self, frame: types.FrameType, *, of_packages: bool = True) -> bool:
        """Return whether output that code of a frame makes is that of the step."""
        is_here = get_ident() == self._thread and not self._is_passing
        return is_here and _is_of_step(frame, of_packages=of_packages)

    def _pass(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Let others output: a warning that Python shows once would else be output of the first run alone."""
        is_outer, self._is_passing = not self._is_passing, True
        try:
            function(*args, **kwargs)
        finally:
            self._is_passing = not is_outer

    def note(self, path: str, method: str, *args: Any, **kwargs: Any) -> None:
        """Note a call."""
        self._note(path, method, *args, **kwargs)

    def _print(self, *args: Any, file: Any = None, **kwargs: Any) -> None:
        name = next((name for name in _STREAMS if file is getattr(sys, name) or file is self._streams[name]), None)
        if (name is not None or file is None) and self.notes(sys._getframe(1)):
            self.note(f"sys.{name or _STREAMS[0]}", "print", *args, **kwargs)
        else:
            _PRINT(*args, file=file if name is None and file is not None else self._streams[name or "stdout"], **kwargs)

    def _module_print(self) -> Callable[..., None]:
        def output(module: Any, *args: Any, **kwargs: Any) -> None:
            self.note("self", "print", *args, **kwargs)

        return output

    def _handling(self) -> Callable[..., None]:
        def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
            if not self.notes(sys._getframe(1), of_packages=False):
                self._pass(_HANDLE, logger, record)
                return
            error = logging.Formatter().formatException(record.exc_info) if record.exc_info else None
            place = (record.levelno, record.pathname, record.lineno, record.funcName, error)
            self.note("logging", "handle", logger.name, place, record.msg, record.args)

        return handle

    def _warn(self, message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any) -> None:
        frame: types.FrameType | None = sys._getframe(1)
        assert frame is not None, "this is called"
        if not self.notes(frame, of_packages=False):
            self._pass(_WARN, message, category, stacklevel + 2, *args, **kwargs)
            return
        for _ in range(stacklevel - 1):
            frame = frame if frame is None else frame.f_back
        frame = frame or sys._getframe(1)
        kind = type(message) if isinstance(message, Warning) else category or UserWarning
        place = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", "__main__"))
        self.note("warnings", "warn", str(message), kind, place)

    def _tqdm_write(self, usual: Callable[..., None]) -> Callable[..., None]:
        def write(_: Any, text: Any, file: Any = None, end: str = "\n", nolock: bool = False) -> None:
            if file in (None, *self._streams.values(), sys.stdout, sys.stderr) and self.notes(sys._getframe(1)):
                is_error = file is not None and file in (sys.stderr, self._streams["stderr"])
                self.note("tqdm", "write", str(text), is_error, end)
            else:
                usual(text, file, end, nolock)

        return write


class OutputStream:
    """Stand for `sys.stdout` or `sys.stderr` while a step runs."""

    def __init__(self, stream: Any, name: str, functions: _Functions) -> None:
        self._stream, self._name, self._functions = stream, name, functions

    def write(self, text: str) -> int:
        """Note a text, or write it."""
        if not self._functions.notes(sys._getframe(1)):
            written: int = self._stream.write(text)
            return written
        self._functions.note(self._name, "write", text)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_of_step(frame: types.FrameType | None, *, of_packages: bool) -> bool:
    """Return whether the code of a frame, or what it outputs for, belongs to the user's step."""
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in _DEBUGGERS):
            return False
        is_between = file == __file__ or any(part in file for part in _WRAPPERS)
        if not is_between and (is_frameworks(file) or not is_library(file)):
            return not is_frameworks(file) and (of_packages or not is_installed(file))
        frame = frame.f_back
    return False


def make_output(path: str, method: str, args: Sequence[Any], kwargs: Any, *, module: pl.LightningModule) -> None:
    """Give to an output function what a step has given it.

    Args:
        path: whose function, as it was noted.
        method: its name.
        args: positional arguments, as they were noted.
        kwargs: keyword arguments.
        module: of the step.
    """
    match path, method:
        case "self", "print":
            module.print(*args, **kwargs)
        case _, "print":
            _PRINT(*args, file=getattr(sys, path.removeprefix("sys.")), **kwargs)
        case "logging", "handle":
            name, (level, file, line, function, error), message, given = args
            logger = logging.getLogger(name)
            if logger.isEnabledFor(level):
                record = logger.makeRecord(name, level, file, line, message, given, None, function)
                record.exc_text = error
                logger.handle(record)
        case "warnings", "warn":
            text, kind, (file, line, name) = args
            namespace = vars(sys.modules.get(name, sys.modules["__main__"]))
            registry = namespace.setdefault("__warningregistry__", {})
            warnings.warn_explicit(text, kind, file, line, module=name, registry=registry)
        case "tqdm", "write":
            text, is_error, end = args
            sys.modules["tqdm.std"].tqdm.write(text, file=sys.stderr if is_error else None, end=end)
        case _:
            getattr(sys, path.removeprefix("sys.")).write(*args)
