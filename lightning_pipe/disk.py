"""Writing to a disk that may be full: the text of a failure, and what a process that was stopped has left behind."""

from __future__ import annotations

import contextlib
import errno
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from lightning_pipe.units import format_bytes

UNFINISHED_S = 3600.0  # a file that nobody has written to for so long belongs to no process that runs
_FULL = {errno.ENOSPC: "no space is left", errno.EDQUOT: "the quota is used up", errno.EFBIG: "a file grew too large"}


def write_failure(error: BaseException, path: Path, needed_bytes: int) -> str:
    """Return what a failed write is reported as: for a full disk with the path, what is needed, and what is free.

    Args:
        error: what was raised; `torch.save` raises another error over the one of the disk.
        path: what was written.
        needed_bytes: its size, about.
    """
    found = next((one for one in _chain(error) if isinstance(one, OSError) and one.errno in _FULL), None)
    free_bytes = _free_bytes(path)
    if found is not None and found.errno is not None:
        reason = _FULL[found.errno]
    elif isinstance(error, RuntimeError) and free_bytes is not None and free_bytes < needed_bytes:
        reason = _FULL[errno.ENOSPC]
    else:
        return f"{type(error).__name__}: {error}"
    free = "" if free_bytes is None else f", and the disk has {format_bytes(free_bytes)}"
    return f"{reason} at {path}: it needs about {format_bytes(needed_bytes)}{free}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised over."""
    seen: set[int] = set()
    while id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__ or error


def _free_bytes(path: Path) -> int | None:
    """Return what the disk of a path has left; None if that is not known."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(next(folder for folder in path.absolute().parents if folder.exists())).free
    return None


def remove_unfinished(folder: Path, pattern: str) -> None:
    """Remove files and folders that processes which were stopped have begun to write; what may go on stays.

    Args:
        folder: where they are.
        pattern: of their names.
    """
    for path in folder.glob(pattern):
        with contextlib.suppress(OSError):  # another process has removed it, or it is not ours to remove
            if time.time() - max(one.stat().st_mtime for one in (path, *path.rglob("*"))) > UNFINISHED_S:
                remove(path)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there.

    Raises:
        OSError: if that is not possible.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
