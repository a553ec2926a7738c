"""Memory that processes of one host share through a file descriptor."""

from __future__ import annotations

import contextlib
import os
import tempfile


def new_memory(byte_count: int, *, name: str) -> int:
    """Return the descriptor of new memory of this size, which lives as long as somebody has it open or mapped."""
    descriptor = _unnamed_file(name)
    os.truncate(descriptor, byte_count)
    return descriptor


def _unnamed_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            return os.memfd_create(name)
    descriptor, path = tempfile.mkstemp(prefix=name)
    os.unlink(path)
    return descriptor
