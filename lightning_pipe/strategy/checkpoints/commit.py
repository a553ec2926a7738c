"""Write a checkpoint so that the last complete one is never lost, whenever the process dies.

begin      the new one is written beside its place, under a hidden name
commit     the old one steps aside, the new one takes its name, the old one goes
discard    the new one is removed, as it cannot be finished
existing   what is there to be read: where a process died between the two, the old one under its hidden name
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from lightning_pipe.disk import remove, remove_unfinished

_PART, _BEFORE = "lightning_pipe.part", "before"


def begin(path: Path) -> Path:
    """Return where to write what will be at `path`; what processes that died have left there is removed."""
    there = existing(path)
    if there != path and there.exists():
        there.rename(path)
    discard(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(path.parent, f".*.{_PART}")
    return _hidden(path, _PART)


def discard(path: Path) -> None:
    """Remove what was begun to be written, if it was."""
    with contextlib.suppress(FileNotFoundError):
        remove(_hidden(path, _PART))


def commit(path: Path) -> None:
    """Let what was written take its place."""
    part, before = _hidden(path, _PART), _hidden(path, _BEFORE)
    for file in [part, *part.rglob("*")] if part.is_dir() else [part]:
        _flush(file)
    if path.is_dir() or part.is_dir():
        remove(before)
        if path.exists():
            path.rename(before)
        part.rename(path)
    else:
        os.replace(part, path)
    _flush(path.parent)
    remove(before)


def existing(path: Path) -> Path:
    """Return where the last complete checkpoint of this name is; the name itself if there is none."""
    before = _hidden(path, _BEFORE)
    return before if before.exists() and not path.exists() else path


def _hidden(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")


def _flush(path: Path) -> None:
    """Have a file, or the names in a directory, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
