"""Garbage collection held back while many objects are created.

It would walk over all of them again and again, which takes longer than making them. A walk over all objects of an
interpreter that has imported torch takes 0.3 s.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Hold the collector back."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def older_set_aside() -> Iterator[None]:
    """Let the collector walk over no object that is there now. What is made inside is collected as ever."""
    if gc.get_freeze_count():
        yield  # another has set objects aside, and gives them back
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
