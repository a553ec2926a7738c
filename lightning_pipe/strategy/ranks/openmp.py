"""Threads of OpenMP, which a forked process waits for though it does not have them.

GNU's runtime keeps the threads of its last parallel region for the next one. A process that is forked then believes
that it has them too, and its first operation that is large enough for several threads never ends. (LLVM's and Intel's
begin anew in a forked process by themselves.)
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

_NAME = "libgomp"
_HARD = 2  # omp_pause_hard of <omp.h>, OpenMP 5.0: release everything; the next parallel region begins anew
_MAPS = Path("/proc/self/maps")


def release_threads() -> None:
    """Let this thread's next parallel region start new threads, here and in processes that it forks."""
    for path in _runtimes():
        with contextlib.suppress(OSError, AttributeError):  # deleted from the disk; older than GCC 9
            ctypes.CDLL(path).omp_pause_resource_all(_HARD)


def _runtimes() -> set[str]:
    """List the files of the GNU runtimes that are loaded: several packages bring one."""
    if not _MAPS.exists():
        return set()
    paths = (line.partition("/")[2] for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines())
    return {f"/{path}" for path in paths if Path(path).name.startswith(_NAME)}
