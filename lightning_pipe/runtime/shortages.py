"""Shortages of what an operating system gives: file descriptors, threads and processes, memory to start them.

Whoever meets one raises an `OSError` with its number, or a `RuntimeError` with the words of a library. They are told
from other errors here, and named with the limit and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
import traceback
from collections.abc import Iterator

from lightning_pipe.errors import PipeError, ShortageError

_FEWER = "or start fewer ranks and workers of loaders on this host"
_SHORTAGES = (  # numbers of errors, words of libraries, the limit, what is short, what to do
    (
        (errno.EMFILE, errno.ENFILE),
        ("Too many open files",),
        "RLIMIT_NOFILE",
        "a process may have {limit} open files (`ulimit -n`), and this one needs more",
        f"Raise that before the start (`ulimit -n 65536`), {_FEWER}.",
    ),
    (
        (errno.EAGAIN,),
        ("can't start new thread", "Resource temporarily unavailable"),
        "RLIMIT_NPROC",
        "no thread or process can be started; a user may have {limit} (`ulimit -u`), a container fewer (`pids.max`)",
        f"Raise that, set OMP_NUM_THREADS=1, {_FEWER}.",
    ),
    (
        (errno.ENOMEM,),
        (),
        "RLIMIT_AS",
        "there is no memory for it; a process may have {limit} bytes (`ulimit -v`), a container less",
        f"Raise that, {_FEWER}.",
    ),
)


@contextlib.contextmanager
def shortages_named(what: str) -> Iterator[None]:
    """Raise an error for people where something cannot be started inside, as a limit is reached.

    Args:
        what: is started.

    Raises:
        ShortageError: with what is short, the limit, and what to do.
    """
    try:
        yield
    except ShortageError:
        raise
    except Exception as error:
        if named := shortage(error):
            raise ShortageError(f"{what} cannot start: {named} ({error})") from error
        raise


def shortage(error: BaseException) -> str:
    """Return in words what an error says is short, and what to do; "" if it says something else."""
    root = error.__cause__ if isinstance(error, PipeError) else error
    if not isinstance(root, (OSError, RuntimeError)):
        return ""
    number = getattr(root, "errno", None)
    if number == errno.EAGAIN and not _starts_process(root):  # a lock of a file, say
        return ""
    for numbers, words, name, short, advice in _SHORTAGES:
        if number in numbers or any(word in str(root) for word in words):
            return f"{short.format(limit=_limit(name))}. {advice}"
    return ""


def _starts_process(error: BaseException) -> bool:
    """Return whether an error comes from where Python starts processes."""
    places = (place.filename for place in traceback.extract_tb(error.__traceback__))
    return any(path == subprocess.__file__ or "/multiprocessing/" in path for path in places)


def _limit(name: str) -> str:
    """Return a limit of this process in words."""
    with contextlib.suppress(ImportError):
        import resource  # not on every platform

        limit, _ = resource.getrlimit(getattr(resource, name))
        return "any number of" if limit == resource.RLIM_INFINITY else str(limit)
    return "a limited number of"
