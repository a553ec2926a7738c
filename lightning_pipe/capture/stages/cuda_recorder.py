"""Recorders: what a function launches on a device is recorded once, and is one launch from then on (CUDA graphs)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

Launches = Callable[[], list[torch.Tensor]]
T = TypeVar("T")


class LaunchRecorder(Protocol):
    """Records what functions launch on a device."""

    device: torch.device

    def try_out(self, function: Callable[[], T]) -> T:
        """Run a function as it will be recorded; it may initialise libraries and choose kernels now."""

    def record(self, function: Launches) -> Launches:
        """Return a function that launches what a function launches.

        Args:
            function: reads and writes tensors that stay where they are; returns tensors of one dimension.

        Returns:
            Launches, and returns tensors with what the function would return, which hold until the next launch.

        Raises:
            RuntimeError: if the function waits for the device, or launches what cannot be recorded.
        """


class CudaRecorder:
    """CUDA graphs, which share the memory that they need while they run.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def try_out(self, function: Callable[[], T]) -> T:
        """See `LaunchRecorder`."""
        with self._beside():
            return function()

    def record(self, function: Launches) -> Launches:
        """See `LaunchRecorder`."""
        # Not `torch.cuda.graph`, which waits for the whole device: a message may be under way that waits for this rank.
        graph = torch.cuda.CUDAGraph()
        with self._beside():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads copy messages
            try:
                results = function()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        aliases = [_alias(result) for result in results]  # their memory may be used by further graphs

        def launch() -> list[torch.Tensor]:
            graph.replay()
            return aliases

        return launch

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Run on a stream of its own, as recording must, in turn with the current one."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


@dataclass(frozen=True)
class _Memory:
    """Memory of a device that somebody else owns."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that does not keep it."""
    if not tensor.numel():
        return torch.empty_like(tensor)
    memory = torch.as_tensor(_Memory(tensor.data_ptr(), tensor.nbytes), device=tensor.device)
    return memory.view(tensor.dtype)
