"""Freed memory that the C library keeps: what a step frees, the next one needs again.

glibc gives a large block (of 32 MiB in any case, of less at first) pages of its own, which go back to the system when
it is freed. The next one has new pages, which the kernel clears and maps one by one: for GPT-2 with 124 million
parameters that was a sixth of the step of a CPU rank (1.07 of 6.4 s; with what caches lose, a quarter). Devices have an
allocator of their own, which keeps what is freed; other C libraries than glibc are left as they are. So is a process
that is held to a limit (`ulimit -d` or `-v`): blocks that are kept lie scattered, and the heap grows beyond their sum.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # options of mallopt (malloc.h)
_NEVER = -1
_USUAL_BLOCKS = 65_536  # with pages of their own, at most
_OF_TENSORS_BYTES = 2**16
_LARGEST_BYTES = 32 * 2**20  # that glibc's own threshold grows to, as it sees large blocks freed


@contextlib.contextmanager
def freed_memory_kept(*, wanted: bool = True) -> Iterator[None]:
    """Keep what is freed inside, if that is wanted; afterwards all that is free goes back to the system."""
    library = _glibc() if wanted and not _is_limited() else None
    if library is None or is_freed_memory_kept():
        yield
        return
    _kept[0] = True
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    library.mallopt(_MMAP_MAX, 0)
    try:
        yield
    finally:
        library.mallopt(_MMAP_MAX, _USUAL_BLOCKS)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_BYTES)
        return_freed_memory()
        _kept[0] = False


def is_freed_memory_kept() -> bool:
    """Return whether freed memory is kept now."""
    return _kept[0]


def return_freed_memory(*, at_once: bool = False) -> None:
    """Let glibc give back to the system what is free in its heap; with another C library, do nothing.

    Args:
        at_once: whether tensors of some size have pages of their own from now on, which go back when they are freed.
    """
    library = _glibc()
    if library is None:
        return
    if at_once:
        library.mallopt(_MMAP_THRESHOLD, _OF_TENSORS_BYTES)
    library.malloc_trim(0)


_kept = [False]


def _is_limited() -> bool:
    """Return whether the system limits the private memory or the addresses of this process."""
    try:
        import resource  # not on every platform
    except ImportError:
        return False
    return any(
        resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    )


@functools.cache
def _glibc() -> Any:
    """Return the C library if it is glibc."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None
