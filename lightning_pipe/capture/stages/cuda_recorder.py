"""Recorders: what a function launches on a device is recorded once, and is one launch from then on (CUDA graphs)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from lightning_pipe.capture.torch_private import end_allocation

Launches = Callable[[], list[torch.Tensor]]
T = TypeVar("T")


class LaunchRecorder(Protocol):
    """Records what functions launch on a device."""

    device: torch.device

    def try_out(self, function: Callable[[], T]) -> T:
        """Run a function as it will be recorded; it may initialise libraries and choose kernels now.

        Raises:
            RuntimeError: if it is known to wait for the device.
        """

    def record(self, function: Launches) -> Launches:
        """Return a function that launches what a function launches.

        Args:
            function: reads and writes tensors that stay where they are; returns tensors of one dimension.

        Returns:
            Launches, and returns tensors with what the function would return, which hold until the next launch.

        Raises:
            RuntimeError: if the function does what cannot be recorded.
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
            for _ in range(2):  # libraries may wait when they first run
                with _told_of_waits() as waits:
                    result = function()
                if not waits:
                    return result
        raise RuntimeError("the host waits for the device in it")

    def record(self, function: Launches) -> Launches:
        """See `LaunchRecorder`."""
        # Not `torch.cuda.graph`, which waits for the whole device: a message may be under way that waits for this rank.
        with self._beside():
            try:
                graph, results = self._recorded(function)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it may have ended, after all
                    end_allocation(self.device, self._pool)
                self._recorded(lambda: torch.zeros(1, device=self.device))  # which ends the recording of random numbers
                raise
        aliases = [_alias(result) for result in results]  # their memory may be used by further graphs

        def launch() -> list[torch.Tensor]:
            graph.replay()
            return aliases

        return launch

    def _recorded(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads copy messages
        try:
            results = function()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                graph.capture_end()
            raise
        graph.capture_end()
        return graph, results

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Run on a stream of its own, as recording must, in turn with the current one."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


@contextlib.contextmanager
def _told_of_waits() -> Iterator[list[str]]:
    """Give what torch says of operations for which the host waits, when they have run."""
    before, waits = torch.cuda.get_sync_debug_mode(), list[str]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits += [text for one in said if "synchronizing CUDA operation" in (text := str(one.message))]


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
