"""A whole module on the device on which it trains, for some runs of its step that leave no trace.

What a step does may depend on the device: types under autocast, kernels that exist there only, its time. So it is
looked at where it trains; where the device has no room for the whole module, on the host, with the types of the device.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from lightning_pipe.capture import Request
from lightning_pipe.capture.recording.unit_state import left_as_it_was
from lightning_pipe.lightning_names import pl
from lightning_pipe.strategy.lightning_private import located

log = logging.getLogger(__name__)

T = TypeVar("T")
_HOST = torch.device("cpu")


def move_module(module: pl.LightningModule, device: torch.device) -> None:
    """Move parameters and buffers to a device; `left_as_it_was` brings them back."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else buffer.to(device)


def run_on_device(
    run: Callable[[Request, Sequence[torch.Tensor]], T], request: Request, tensors: Sequence[torch.Tensor]
) -> T:
    """Return what runs of a step on real tensors give: on its device, or on the host if that has not the memory.

    Args:
        run: runs the step of the request it is given, on the tensors that it is given.
        request: the step; its module has all its values.
        tensors: leaves of a batch.
    """
    device = request.device
    if device.type != "cpu":
        try:
            return _run_on(device, run, request, tensors)
        except Exception as error:
            if not _ran_out(error):
                raise
        log.warning(
            "%s does not fit into the memory of %s as a whole, so its units are found by runs on the host, which take "
            "longer.",
            *(type(request.module).__name__, device),
        )
        torch.cuda.empty_cache()
    context = _with_types_of(device, request.context)
    return _run_on(_HOST, run, replace(request, device=_HOST, context=context), tensors)


def _run_on(
    device: torch.device,
    run: Callable[[Request, Sequence[torch.Tensor]], T],
    request: Request,
    tensors: Sequence[torch.Tensor],
) -> T:
    module = request.module
    is_there = all(tensor.device == device or tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    with contextlib.nullcontext() if is_there else left_as_it_was(module), located(module, device):
        move_module(module, device)
        return run(request, [tensor.detach().to(device) for tensor in tensors])


def _ran_out(error: BaseException | None) -> bool:
    """Return whether a device had too little memory, whatever was made of that."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or _ran_out(error.__cause__))


def _with_types_of(
    device: torch.device, context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context in which the host computes in the types that autocast gives on a device."""
    if device.type == "cpu":
        return context

    @contextlib.contextmanager
    def on_host() -> Iterator[None]:
        with context():
            is_cast, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
            with torch.autocast("cpu", dtype=dtype, enabled=is_cast, cache_enabled=False):
                yield

    return on_host
