"""Tensor memory of this process: its peak during a block, and the state that stays.

    with PeakMemory(device) as peak:
        step()
    peak.bytes

On an accelerator the allocator keeps count. On the host it is the running sum of all allocations and releases of the
thread that runs the block (`capture.allocations`).

Also here: what holds a process to a limit (`held_to`), and how running into one is told from other errors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

import torch

from lightning_pipe.capture.allocations import Allocations, highest
from lightning_pipe.capture.device_streams import finish_stream
from lightning_pipe.errors import OutOfMemoryError
from lightning_pipe.freed_memory import return_freed_memory


class PeakMemory:
    """Measure, in bytes, by how much the memory of tensors rises above what it is at the start of a block, at most.

    The block must run in one thread; on the host every operation becomes some microseconds slower, and what was there
    before the block counts as if it stayed.

    Args:
        device: where the tensors are.

    Attributes:
        bytes: after the block; None where torch's profiler has failed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: Allocations | None = None
        self._baseline = 0
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            finish_stream(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._baseline = torch.cuda.memory_allocated(self._device)
        else:
            self._seen = Allocations()
            self._seen.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._seen is None:
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._baseline
            return
        self._seen.__exit__(kind, error, traceback)
        self.bytes = None if self._seen.failed else highest(self._seen.changes)
        self._seen = None


def state_bytes(tensors: Iterable[torch.Tensor], *, optimizers: Iterable[torch.optim.Optimizer] = ()) -> int:
    """Return the bytes of parameters and buffers, of their gradients, and of the state of optimizers.

    Memory that several tensors share counts once.

    Args:
        tensors: parameters and buffers.
        optimizers: their state is counted, whichever parameters it belongs to.
    """
    own = list(tensors)
    gradients = [tensor.grad for tensor in own if tensor.grad is not None]
    entries = [entry for optimizer in optimizers for entry in optimizer.state.values() if isinstance(entry, Mapping)]
    states = [value for entry in entries for value in entry.values()]
    everything = [*own, *gradients, *(value for value in states if isinstance(value, torch.Tensor))]
    storages = (tensor.untyped_storage() for tensor in everything)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had."""
    words = str(error)
    on_host = isinstance(error, RuntimeError) and any(said in words for said in _SAID_BY_HOSTS)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or on_host


def out_of_memory(where: str, error: BaseException) -> OutOfMemoryError:
    """Return the error that tells a user that memory did not suffice, and what would help."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = next((line for line in lines if any(known in line for known in _SAID_BY_HOSTS)), lines[0])
    return OutOfMemoryError(
        f"{where}: out of memory ({said}). The plan keeps more than this rank can have. Set memory_limit to what a "
        "rank may take, so that plans keep to it; more micro-batches, shard_optimizer, a smaller batch or more devices "
        "make them smaller."
    )


_SAID_BY_HOSTS = ("can't allocate memory", "not enough memory", "Cannot allocate memory")  # of torch's CPU allocator


@contextlib.contextmanager
def held_to(device: torch.device, limit_bytes: int, *, there_bytes: int = 0) -> Iterator[None]:
    """Let tensors of this process take no more than a limit inside; what is beyond raises an error that says so.

    On CUDA it is the allocator that refuses. On a Linux host the kernel does (`RLIMIT_DATA`), for all private memory of
    the process: what Python takes inside counts too, and memory that the C library keeps after a release.

    Args:
        device: where the tensors are.
        limit_bytes: the limit.
        there_bytes: bytes of tensors that are there already, on a host.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    import resource  # not on every platform

    return_freed_memory(at_once=True)  # else freed tensors stay in the process, in its heap
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (private_bytes() - there_bytes + limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def private_bytes() -> int:
    """Return the private memory of this process as `RLIMIT_DATA` counts it, on Linux."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmData:")) * 1024
