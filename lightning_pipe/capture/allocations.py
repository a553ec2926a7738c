"""Host memory allocated and released by a block of code, read from torch's profiler.

    with Allocations() as seen:
        with span("first"):
            ...
    seen.changes, seen.spans

torch's profiler reports every allocation and release of the thread that runs the block. The release of what was
allocated before the block does not count (torch tells of it at times, with the size of what was at that address in an
earlier block), and of what another thread releases nothing is told: both count as if they had stayed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from types import TracebackType
from typing import NamedTuple

import torch
from torch.autograd.profiler import profile

from lightning_pipe.capture.torch_private import recorded_events

_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "99"  # above all levels
log = logging.getLogger(__name__)


@contextmanager
def _without_messages() -> Iterator[None]:
    """Keep torch's profiler from printing lines that begin with USDT when it starts and ends.

    The variable is taken away again: the environment may be read by the user's step, so a change of ours would count as
    one of the step.
    """
    if _LEVEL in os.environ:
        yield
        return
    os.environ[_LEVEL] = _SILENT
    try:
        yield
    finally:
        del os.environ[_LEVEL]


class MemoryChange(NamedTuple):
    """Bytes that were allocated (positive) or released (negative) at a time, in nanoseconds."""

    time_ns: int
    bytes: int


class Allocations:
    """Record the allocations of a block, as a context manager. No other profiler of torch may run in this thread.

    Attributes:
        changes: all of them in order, after the block.
        spans: (start, end) of every `span` of the block by name, in nanoseconds.
        failed: whether torch's profiler could not tell (it has been seen to run out of memory, `std::bad_alloc`, in the
            middle of a training that had plenty); then there are no changes and no spans.
    """

    def __init__(self) -> None:
        with _without_messages():
            self._profile = profile(use_cpu=True, profile_memory=True)
        self.failed = False
        self.changes: tuple[MemoryChange, ...] = ()
        self.spans: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> Allocations:
        with _without_messages():
            self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with _without_messages():
                self._profile.__exit__(kind, error, trace)
            self._read()
        except MemoryError as failure:
            log.warning("torch's profiler has failed, so allocations are not known: %s", failure)
            self.failed, self.changes, self.spans = True, (), {}

    def _read(self) -> None:
        changes: list[MemoryChange] = []
        there: set[int] = set()  # addresses of what was allocated in the block
        for event in recorded_events(self._profile):
            if event.address is None:
                if event.name.startswith(_SPAN):
                    self.spans[event.name.removeprefix(_SPAN)] = (event.start_ns, event.end_ns)
            elif event.host_bytes > 0 or event.address in there:
                changes.append(MemoryChange(event.start_ns, event.host_bytes))
                (there.add if event.host_bytes > 0 else there.remove)(event.address)
        self.changes = tuple(changes)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Give what happens within a block of `Allocations` a name."""
    with torch.profiler.record_function(_SPAN + name):
        yield


def highest(changes: Iterable[MemoryChange]) -> int:
    """Return by how many bytes memory rises above what it is before these changes, at most."""
    return max(accumulate((change.bytes for change in changes), initial=0))


_SPAN = "span of allocations: "
