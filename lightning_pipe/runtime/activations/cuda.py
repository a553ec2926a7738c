"""Offloading on a CUDA device: one stream for each direction copies between the device and pinned memory of the host.

    out     waits for the compute stream at `take`, then copies; the compute stream waits for the end before the memory
            is given up, so that the allocator may use it again at once (no `record_stream`, with which it could so
            only when the host finds the copy ended, and would take more memory until then)
    back    waits for the compute stream at `fetch`, whose memory it fills, and for the end of the way out
    use     the compute stream waits for the end of the way back; the host never waits

Pinned buffers are kept by size and used again behind the copy that has read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_pipe.runtime.activations.protocol import StorageRange
from lightning_pipe.runtime.record import Mark
from lightning_pipe.runtime.waiting import Independent


@dataclass(frozen=True)
class _Copied(Independent):
    """The handle of a copy that ends with an event."""

    begin: torch.cuda.Event
    end: torch.cuda.Event

    def wait(self, timeout_s: float) -> bool:
        """Let the current stream wait for the copy; the host does not."""
        torch.cuda.current_stream().wait_event(self.end)
        return True

    def landed(self) -> bool:
        """Return whether the copy has ended."""
        return bool(self.end.query())


@dataclass(frozen=True)
class _Pinned:
    """A buffer of the host, and the copy that used it last."""

    buffer: torch.Tensor
    used: torch.cuda.Event | None


class PinnedHost:
    """Keep pieces in pinned memory.

    Args:
        device: whose memory is offloaded.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._free: dict[int, list[_Pinned]] = defaultdict(list)

    def take(self, pieces: Sequence[StorageRange]) -> _PinnedParcel:
        """Start to copy pieces to the host."""
        return _PinnedParcel(self, pieces)

    def close(self) -> None:
        """Wait for all copies, and free the pinned memory."""
        self._out.synchronize()
        self._back.synchronize()
        self._free.clear()

    def copy_out(self, contents: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], _Copied]:
        """Copy bytes of the device into pinned buffers; return these, and the handle."""
        self._out.wait_stream(torch.cuda.current_stream(self.device))
        buffers = [self._pinned(content.numel()) for content in contents]
        with torch.cuda.stream(self._out):
            begin, end = _event(), _event()
            begin.record()
            for content, buffer in zip(contents, buffers, strict=True):
                buffer.copy_(content, non_blocking=True)
            end.record()
        return buffers, _Copied(begin, end)

    def copy_back(self, buffers: Sequence[torch.Tensor], after: _Copied) -> tuple[list[torch.Tensor], _Copied]:
        """Copy pinned buffers into new memory of the device; return that, and the handle."""
        contents = [torch.empty_like(buffer, device=self.device) for buffer in buffers]
        self._back.wait_stream(torch.cuda.current_stream(self.device))
        self._back.wait_event(after.end)
        with torch.cuda.stream(self._back):
            begin, end = _event(), _event()
            begin.record()
            for buffer, content in zip(buffers, contents, strict=True):
                content.copy_(buffer, non_blocking=True)
            end.record()
        self.leave(buffers, end)
        return contents, _Copied(begin, end)

    def leave(self, buffers: Sequence[torch.Tensor], used: torch.cuda.Event) -> None:
        """Take buffers back that a copy uses until an event."""
        for buffer in buffers:
            self._free[buffer.numel()].append(_Pinned(buffer, used))

    def _pinned(self, size: int) -> torch.Tensor:
        """Return a buffer; the way out waits for the copy that has used it."""
        if not self._free[size]:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        found = self._free[size].pop(0)
        if found.used is not None:
            self._out.wait_event(found.used)
        return found.buffer


class _PinnedParcel:
    """Pieces in pinned memory.

    Attributes:
        left, returned: handles of the ways out and back.
    """

    def __init__(self, host: PinnedHost, pieces: Sequence[StorageRange]) -> None:
        self._host = host
        self._buffers, self.left = host.copy_out([piece.as_bytes() for piece in pieces])
        self.returned = self.left  # until it is fetched
        self._contents: list[torch.Tensor] = []

    def fetch(self) -> None:
        """Start to copy the pieces into new memory."""
        self._contents, self.returned = self._host.copy_back(self._buffers, self.left)
        self._buffers = []

    def storages(self) -> Sequence[torch.UntypedStorage]:
        """Return the new memory."""
        return [content.untyped_storage() for content in self._contents]

    def hand_over(self) -> Sequence[torch.UntypedStorage]:
        """Return the new memory, and forget it."""
        storages, self._contents = self.storages(), []
        return storages

    def spans(self) -> tuple[tuple[Mark, Mark], ...]:
        """Return begin and end of the copies."""
        return tuple((copy.begin, copy.end) for copy in dict.fromkeys((self.left, self.returned)))

    def discard(self) -> None:
        """Give the pinned buffers back, unless that has been done; memory is used again behind the copies only."""
        for copy in (self.left, self.returned):
            copy.wait(0.0)
        self._host.leave(self._buffers, self.left.end)
        self._buffers, self._contents = [], []


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
