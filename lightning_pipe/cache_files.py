"""Files of the cache: every one is written and read here, and is what was written or is not used.

    lightning_pipe VERSION SHA256     the first line; the hash is of the file's name, the version, and all that follows
    content

A file is read only if this line is the very one that its content would be written with. One that is damaged, cut short,
under another name or of another version is removed, which a warning says; its owner makes the content again.

A hash is no signature: who may write to the folder can write a whole file. So a folder of the cache belongs to the user
(or to root), and nobody else may write to it; others are not used. What readers make of content runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lightning_pipe.disk import remove_unfinished, write_failure

T = TypeVar("T")
log = logging.getLogger(__name__)
FOLDER_LOG = logging.getLogger(f"{__name__}.folder")  # the strategy disables it on all ranks of a host but one

_NAME = b"lightning_pipe "
_MOST_BYTES = 16 << 20  # of the files of one kind in a folder
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_open = io.open  # while a step is traced, `open` refuses what the step does not read itself
_refused: set[Path] = set()  # folders that a warning has named


def read(path: Path, parse: Callable[[bytes], T], *, version: int) -> T | None:
    """Return the content of a cache file; None if there is none, or none that can be used, which a warning says.

    Args:
        path: the file.
        parse: reads the content; whatever it raises is a reason not to use the file.
        version: of the content.
    """
    try:
        with _open(path, "rb") as file:
            written = file.read()
        content = written.partition(b"\n")[2]
        if written == _sealed(content, name=path.name, version=version):
            parsed = parse(content)
            with contextlib.suppress(OSError):  # in a folder of root
                os.utime(path)
            return parsed
        is_other = written.startswith(_NAME) and not written.startswith(_start(version))
        reason = "another version wrote it" if is_other else "its content is not what was written"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:
        reason = f"it cannot be read: {error!r}"
    drop(path, reason)
    return None


def drop(path: Path, reason: str) -> None:
    """Remove a file that cannot be used; of all ranks of a host, the one that removes it warns."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        reason = f"{reason} (nor can it be removed: {error.strerror})"
    log.warning("The cache file %s is not used, as %s; its content is made again.", path, reason)


def write(path: Path, content: bytes, *, version: int, most_bytes: int = _MOST_BYTES) -> bool:
    """Write a cache file as a whole or not at all; return whether it is there. A warning says what went wrong.

    Nothing is flushed to the disk: a file that a crash of the host cuts short is not used.

    Args:
        path: the file.
        content: what `read` will parse.
        version: of the content.
        most_bytes: of all files of its kind in its folder; those that were used least give way.
    """
    sealed = _sealed(content, name=path.name, version=version)
    try:
        make_folder(path.parent)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem[:40]}.", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(sealed)
            os.replace(part, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise
        remove_unfinished(path.parent, "*.part")
        _drop_least_used(path, most_bytes)
    except OSError as error:
        failure = write_failure(error, path, len(sealed))
        log.warning("%s cannot be written (%s); the next start makes its content again.", path, failure)
        return False
    return True


def _sealed(content: bytes, *, name: str, version: int) -> bytes:
    digest = hashlib.sha256(f"{name} {version}\n".encode())
    digest.update(content)
    return _start(version) + digest.hexdigest().encode() + b"\n" + content


def _start(version: int) -> bytes:
    return _NAME + f"{version} ".encode()


def _drop_least_used(path: Path, most_bytes: int) -> None:
    """Remove files of a kind that were not used for longest, where all of them take too many bytes."""
    files = []
    for file in path.parent.glob(f"*{path.suffix}"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            files.append((file.stat(), file))
    taken = sum(status.st_size for status, _ in files)
    for status, file in sorted(files, key=lambda entry: entry[0].st_mtime_ns):
        if taken > most_bytes and file != path:
            file.unlink(missing_ok=True)
            taken -= status.st_size


def make_folder(folder: Path) -> None:
    """Make the folder of a kind, and that of the cache around it, for the user alone; those that are there stay.

    Raises:
        OSError: if that is not possible.
    """
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for made in (folder.parent, folder):
        made.mkdir(mode=0o700, exist_ok=True)


def usable(folder: Path) -> Path | None:
    """Return the folder of a cache; None, and warn once, if others could have written what is in it."""
    try:
        inside = [path for path in folder.iterdir() if path.is_dir()] if folder.exists() else []
        reason = next((f"{path} {text}" for path in (folder, *inside) if (text := _refusal(path))), "")
    except OSError as error:
        reason = f"{folder} cannot be looked at ({error.strerror})"
    if reason and folder not in _refused:
        _refused.add(folder)
        FOLDER_LOG.warning(
            "The cache %s is not used: %s. Expected a folder of your own that nobody else can write to (chmod -R go-w "
            "%s, or another folder as `cache`); until then every start measures and captures again.",
            *(folder, reason, folder),
        )
    return None if reason else folder


def _refusal(folder: Path) -> str:
    """Return why a folder is not used; "" if it is, or is still to be made."""
    if sys.platform == "win32" or not folder.exists():
        return ""
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):  # root can write anyway
        return f"belongs to another user (uid {status.st_uid}, and this is {os.geteuid()})"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"is writable by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""
