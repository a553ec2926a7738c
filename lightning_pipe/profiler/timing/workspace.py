"""Workspace of a call: bytes that it holds while it runs, besides its arguments and results.

    gauge = gauge_of(device)
    with gauge:
        Walk(course, chosen, tools, around=gauge.around).run()
    gauge.scratch         signature -> bytes

    scratch = most bytes that are allocated at once while it runs - bytes of its results

where only those results count that something in the graph takes: what nobody takes is gone after the call, so it is
part of the scratch. On the host allocations are those that torch's profiler reports, on CUDA those that the allocator
counts. Watching makes calls slower, so they are not timed at the same time.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch

from lightning_pipe.capture.allocations import Allocations, highest, span
from lightning_pipe.capture.stages.operation_calls import OperatorCall
from lightning_pipe.capture.torch_private import is_profiling
from lightning_pipe.profiler.timing.arguments import bytes_of

log = logging.getLogger(__name__)


class WorkspaceGauge:
    """Watch calls on the host, as a context manager.

    Attributes:
        scratch: signature -> bytes, the most of all its calls; after the block. Not a number where they cannot be told,
            because another profiler runs, or torch's has failed.
    """

    def __init__(self) -> None:
        self.scratch: dict[str, float] = {}
        self._allocations: Allocations | None = None
        self._watched: list[tuple[str, int]] = []  # signature, bytes of results

    def __enter__(self) -> WorkspaceGauge:
        if is_profiling():
            log.warning("Another profiler runs, so memory that operations need for themselves is not predicted.")
        else:
            self._allocations = Allocations().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._allocations is not None:
            self._allocations.__exit__(kind, error, trace)
        if self._allocations is None or self._allocations.failed:
            self.scratch = dict.fromkeys((signature for signature, _ in self._watched), math.nan)
            return
        times = [change.time_ns for change in self._allocations.changes]
        for number, (signature, made) in enumerate(self._watched):
            start, end = self._allocations.spans[str(number)]
            within = self._allocations.changes[bisect_left(times, start) : bisect_right(times, end)]
            _note(self.scratch, signature, highest(within) - made)

    def around(self, call: OperatorCall) -> Callable[..., Any]:
        """Return a function that makes a call and watches it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self._allocations is None else span(str(len(self._watched))):
                returned = call.target(*args, **kwargs)
            self._watched.append((call.signature, _made_bytes(call, returned, given=(args, kwargs))))
            return returned

        return watched


class CudaGauge(WorkspaceGauge):
    """Watch calls on a CUDA device.

    Args:
        device: which.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __enter__(self) -> CudaGauge:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def around(self, call: OperatorCall) -> Callable[..., Any]:
        """Return a function that makes a call and watches it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.reset_peak_memory_stats(self._device)
            before = self._requested("current")
            returned = call.target(*args, **kwargs)
            most = self._requested("peak") - before
            _note(self.scratch, call.signature, most - _made_bytes(call, returned, given=(args, kwargs)))
            return returned

        return watched

    def _requested(self, which: str) -> int:
        """Return the bytes of all tensors, without what the allocator adds to them, which depends on what is free."""
        return int(torch.cuda.memory_stats(self._device)[f"requested_bytes.all.{which}"])


def gauge_of(device: torch.device) -> WorkspaceGauge:
    """Return the gauge of a device."""
    return CudaGauge(device) if device.type == "cuda" else WorkspaceGauge()


def _note(scratch: dict[str, float], signature: str, found: int) -> None:
    scratch[signature] = max(scratch.get(signature, 0), found)


def _made_bytes(call: OperatorCall, returned: Any, *, given: Any) -> int:
    """Return the bytes of the results that something takes, without those in the memory of arguments."""
    old = {_address(tensor) for tensor in _tensors(given)}
    sizes: dict[int, int] = {}
    for spec, where in call.results:
        address = _address(_taken(returned, where))
        if address not in old:
            sizes[address] = max(sizes.get(address, 0), bytes_of(spec))
    return sum(sizes.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _taken(returned: Any, where: tuple[int, ...]) -> Any:
    for index in where:
        returned = returned[index]
    return returned


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
