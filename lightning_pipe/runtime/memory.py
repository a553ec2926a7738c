"""How much memory does this process take for tensors? Its peak during a block, and the state that stays.

    with PeakMemory(device) as peak:
        step()
    peak.bytes

On an accelerator the allocator keeps count. On the host it is the running sum of all allocations and releases of the
thread that runs the block (`capture.allocations`).
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch

from lightning_pipe.capture.allocations import Allocations, highest


class PeakMemory:
    """Measure, in bytes, by how much the memory of tensors rises above what it is at the start of a block, at most.

    The block must run in one thread; on the host every operation becomes some microseconds slower.

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
            torch.cuda.synchronize(self._device)
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
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in state.values()]
    everything = [*own, *gradients, *(value for value in states if isinstance(value, torch.Tensor))]
    storages = (tensor.untyped_storage() for tensor in everything)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
