"""Look at another process, and end it, by its number: what the system tells about one that is no child.

Imports the standard library only, as everything on the guard's side. Where there is no /proc, less is known.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_WITHOUT = "its process has ended without a word"
_UNKNOWN = f"{_WITHOUT}: it was killed (perhaps for want of memory), aborted by a library, or called os._exit"
_WHY = {
    signal.SIGKILL: "somebody killed it, or the system for want of memory",
    signal.SIGABRT: "a library aborted it; its own terminal says why",
    signal.SIGSEGV: "a library crashed",
    signal.SIGBUS: "a library crashed, or shared memory (/dev/shm) was full",
}


def ending(pid: int) -> str:
    """Say how a process has ended, as exactly as it is known: by which signal or exit code, until it is waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return _UNKNOWN
    status = int(fields[-1])  # exit_code of proc(5), 0 where it may not be read
    if fields[0] != b"Z" or not status:
        return _UNKNOWN
    number = os.waitstatus_to_exitcode(status)
    if number >= 0:
        return f"{_WITHOUT}, with exit code {number}: it called os._exit, or its own terminal says why"
    try:
        name = signal.Signals(-number)
    except ValueError:
        return f"{_WITHOUT}, by signal {-number}"
    return f"{_WITHOUT}, by {name.name}" + (f": {_WHY[name]}" if name in _WHY else "")


def open_process(pid: int) -> int | None:
    """Return a descriptor that is readable once the process has ended; None where there are none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def kill(process: int | None, pid: int | None = None) -> None:
    """Kill the process of a descriptor, or else of a number; nothing if it has ended."""
    with contextlib.suppress(OSError):  # it has ended
        if process is not None and hasattr(signal, "pidfd_send_signal"):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        elif pid is not None:
            os.kill(pid, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal (not by a debugger); False where that cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] == b"T"


def used_ns(pid: int, thread: int) -> int | None:
    """Return the processor time of a thread of a process; None where that cannot be seen."""
    try:
        return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_bytes().split()[0])
    except (OSError, IndexError):
        return None
