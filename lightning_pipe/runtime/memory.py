"""How much memory does this process take for tensors? Its peak during a block, and the state that stays.

    with PeakMemory(device) as peak:
        step()
    peak.bytes

On an accelerator the allocator keeps count. On the host torch's profiler reports every allocation and release of the
thread that runs the block; their running sum is what is wanted. It does not tell of the release of what was allocated
outside any such block, which counts as if it had stayed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile


class PeakMemory:
    """Measure, in bytes, by how much the memory of tensors rises above what it is at the start of a block, at most.

    The block must run in one thread; on the host every operation becomes some microseconds slower.

    Args:
        device: where the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: profile | None = None
        self._baseline = 0
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._baseline = torch.cuda.memory_allocated(self._device)
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
            self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._profile is None:
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._baseline
            return
        self._profile.__exit__(kind, error, traceback)
        if error is None:
            self.bytes = max(0, *accumulate(_changes(self._profile)))
        self._profile = None


def _changes(recorded: profile) -> list[int]:
    """Return the bytes of every allocation (positive) and release (negative) on the host, in order.

    `profile.events()` tells them only as sums per operation, which hide what an operation allocates and releases
    itself; the exported trace has each of them.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == _HOST]
    changes.sort(key=lambda event: event["args"]["Ev Idx"])
    return [0, *(int(event["args"]["Bytes"]) for event in changes)]


_HOST = 0  # as torch numbers types of devices


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
