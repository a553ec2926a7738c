"""Offloading on a CPU: a thread for each direction copies between memory and a temporary file.

The file has no name and goes with the process. Its pages are no memory of the process, so resident memory falls by what
is offloaded. A rate makes copies as slow as those of another link, to emulate it.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import BinaryIO, cast

import torch

from lightning_pipe.runtime.activations.protocol import StorageRange, as_bytes
from lightning_pipe.runtime.record import Mark
from lightning_pipe.runtime.waiting import Independent

_LONGEST_CALL = 1 << 30  # bytes; some systems copy at most 2 GiB at once
_PATIENCE_S = 1.0  # of one wait for a job, which will end


class _Job(Independent):
    """Something that a lane does; the handle of its end."""

    def __init__(self, work: Callable[[], None], count: int, after: _Job | None) -> None:
        self._work, self.count, self._after = work, count, after
        self.span: tuple[Mark, Mark] = (0.0, 0.0)
        self._ended, self._error = threading.Event(), cast("BaseException | None", None)

    def run(self, bytes_per_s: float | None) -> None:
        """Do it, in no less time than the rate allows, once what it comes after is done."""
        begin = time.perf_counter()
        try:
            while self._after is not None and not self._after.wait(_PATIENCE_S):
                pass
            begin = time.perf_counter()
            self._work()
        except BaseException as error:
            self._error = error
        if bytes_per_s is not None:
            time.sleep(max(0.0, begin + self.count / bytes_per_s - time.perf_counter()))
        self.span = begin, time.perf_counter()
        self._work, self._after = _nothing, None  # what it held
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most so long; return whether it is done.

        Raises:
            RuntimeError: if it failed.
        """
        if not self._ended.wait(timeout_s):
            return False
        if self._error is not None:
            raise RuntimeError(f"the copy between memory and the file failed: {self._error}") from self._error
        return True

    def landed(self) -> bool:
        """Return whether it is done."""
        return self._ended.is_set()


def _nothing() -> None:
    """Do nothing."""


class _Lane:
    """Jobs of one direction, one after another, in a thread that begins with the first."""

    def __init__(self, name: str, bytes_per_s: float | None) -> None:
        self._name, self._bytes_per_s = name, bytes_per_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: Callable[[], None], count: int, *, after: _Job | None = None) -> _Job:
        """Do some work on so many bytes when everything before it is done, and a job of the other lane."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        job = _Job(work, count, after)
        self._jobs.put(job)
        return job

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run(self._bytes_per_s)
            del job  # else its handle would keep what it has read until the next one comes

    def close(self) -> None:
        """End the thread when all is done."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


class FileHost:
    """Keep pieces in a temporary file.

    Args:
        directory: where the file is; None takes the system's directory of temporary files.
        bytes_per_s: rate of each direction; None copies as fast as it goes.
    """

    def __init__(self, directory: str | None = None, *, bytes_per_s: float | None = None) -> None:
        self._directory = directory
        self._out, self._back = _Lane("offload", bytes_per_s), _Lane("fetch", bytes_per_s)
        self._file: BinaryIO | None = None
        self._end = 0
        self._free: dict[int, list[int]] = defaultdict(list)  # size -> places in the file
        self._lock = threading.Lock()

    def take(self, pieces: Sequence[StorageRange]) -> _FileParcel:
        """Start to write pieces to the file."""
        return _FileParcel(self, pieces)

    def close(self) -> None:
        """End the threads, and delete the file."""
        self._out.close()
        self._back.close()
        if self._file is not None:
            self._file.close()
        self._file, self._end = None, 0
        self._free.clear()

    def out(self, work: Callable[[], None], count: int) -> _Job:
        """Do something on the way out."""
        return self._out.add(work, count)

    def back(self, work: Callable[[], None], count: int, *, after: _Job) -> _Job:
        """Do something on the way back, after something on the way out."""
        return self._back.add(work, count, after=after)

    def place(self, size: int) -> int:
        """Return a free place of this size in the file."""
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
            self._end += size
            return self._end - size

    def leave(self, place: int, size: int) -> None:
        """Give a place back."""
        with self._lock:
            self._free[size].append(place)

    def write(self, content: torch.Tensor, place: int) -> None:
        """Write bytes to the file."""
        self._copy(os.pwrite, content, place)

    def read(self, content: torch.Tensor, place: int) -> None:
        """Read bytes from the file."""
        self._copy(lambda file, view, at: os.preadv(file, [view], at), content, place)

    def _copy(self, call: Callable[[int, memoryview, int], int], content: torch.Tensor, place: int) -> None:
        view, done = content.numpy().data, 0
        while done < len(view):
            moved = call(self._descriptor(), view[done : done + _LONGEST_CALL], place + done)
            if moved <= 0:
                raise OSError(f"the file of offloaded tensors ends at byte {place + done}")
            done += moved

    def _descriptor(self) -> int:
        with self._lock:
            if self._file is None:
                file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115  closed by `close`
                self._file = cast("BinaryIO", file)
            return self._file.fileno()


class _FileParcel:
    """Pieces in the file.

    Attributes:
        left, returned: handles of the ways out and back.
    """

    def __init__(self, host: FileHost, pieces: Sequence[StorageRange]) -> None:
        self._host = host
        self._places = [(host.place(piece.size), piece.size) for piece in pieces]
        self._count = sum(piece.size for piece in pieces)
        self._storages: list[torch.UntypedStorage] = []
        contents = [piece.as_bytes() for piece in pieces]
        self.left = host.out(lambda: self._write(contents), self._count)
        self.returned: _Job = self.left  # until it is fetched

    def _write(self, contents: list[torch.Tensor]) -> None:
        for (place, _), content in zip(self._places, contents, strict=True):
            self._host.write(content, place)
        contents.clear()

    def fetch(self) -> None:
        """Start to read the pieces into new memory."""
        self._storages = [torch.UntypedStorage(size) for _, size in self._places]
        contents = [as_bytes(storage) for storage in self._storages]
        self.returned = self._host.back(lambda: self._read(contents), self._count, after=self.left)

    def _read(self, contents: list[torch.Tensor]) -> None:
        for (place, size), content in zip(self._places, contents, strict=True):
            self._host.read(content, place)
            self._host.leave(place, size)
        contents.clear()

    def storages(self) -> Sequence[torch.UntypedStorage]:
        """Return the new memory."""
        return self._storages

    def hand_over(self) -> Sequence[torch.UntypedStorage]:
        """Return the new memory, and forget it."""
        storages, self._storages = self._storages, []
        return storages

    def spans(self) -> tuple[tuple[Mark, Mark], ...]:
        """Return begin and end of the copies."""
        return tuple(job.span for job in dict.fromkeys((self.left, self.returned)) if job.landed())

    def discard(self) -> None:
        """Give the places in the file back when they are written, unless they are being read."""
        if self.returned is self.left:
            self._host.out(self._leave, 0)

    def _leave(self) -> None:
        for place, size in self._places:
            self._host.leave(place, size)
