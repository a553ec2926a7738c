"""Optimizer step profile, measured on another optimizer of the same kind over made-up parameters.

    seconds of a step = fixed_s + seconds_per_tensor * parameters + seconds_per_byte * their bytes

from three sets of parameters: a single tiny one, many tiny ones, and a sample of forms like the user's, as large ones
take longer per byte (what a step makes in between no longer fits the caches). The bytes of state per byte of parameters
are those that the sample has after some steps. The user's optimizer is only read: its class, the options of its first
group, and the forms of its parameters. Beside steps the sample is copied, as weight versions are before a step.

Left out: options that differ between groups, and what a step does every so many steps only.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.optim import Optimizer

from lightning_pipe.capture.allocations import Allocations, highest
from lightning_pipe.capture.device_streams import finish_stream
from lightning_pipe.capture.steps.keyed_random import undisturbed
from lightning_pipe.capture.torch_private import is_profiling
from lightning_pipe.core.profile import OptimizerProfile

log = logging.getLogger(__name__)

_MANY, _TINY = 100, 64  # parameters, and elements of each
_SAMPLE_BYTES = 32 * 2**20  # of the sample at most
_SQUARE, _WATCHED = 256, (2, 8)  # rows of parameters on which memory is watched, and how many of them
_SWEPT_BYTES = 64 * 2**20  # more than the caches
_STEPS = 7
_WARM_UPS = 2  # the first step makes the state
_COPIES = 3  # of the sample


def profile_optimizer(optimizer: Optimizer, *, device: torch.device) -> OptimizerProfile:
    """Return the costs of a step.

    An optimizer that cannot be made or stepped like this (one whose class takes other arguments, or whose step needs a
    closure) is said once, and counts as taking no time and as much state as it has now.

    Args:
        optimizer: the user's; it is not changed.
        device: where parameters will be.
    """
    try:
        with undisturbed(device):  # some optimizers draw noise
            one_s, _ = _step(optimizer, [(_TINY,)], device)
            many_s, _ = _step(optimizer, [(_TINY,)] * _MANY, device)
            sample_s, sample = _step(optimizer, _sample(optimizer), device)
            of_all, of_largest = _workspace(optimizer, device)
    except Exception as error:  # of the user's own class, maybe: whatever it is, training goes on
        log.warning(
            "A step of %s cannot be timed apart from training, so it is predicted to take no time: %s",
            type(optimizer).__name__,
            error,
        )
        return OptimizerProfile(state_bytes_per_byte=_state_per_byte(optimizer))
    per_tensor = max(0.0, (many_s - one_s) / (_MANY - 1))
    fixed = max(0.0, one_s - per_tensor)
    parameters = _parameters(sample)
    return OptimizerProfile(
        seconds_per_byte=max(0.0, sample_s - fixed - len(parameters) * per_tensor) / sum(p.nbytes for p in parameters),
        seconds_per_tensor=per_tensor,
        fixed_s=fixed,
        state_bytes_per_byte=_state_per_byte(sample),
        workspace_per_byte=of_all,
        workspace_per_largest_byte=of_largest,
        copy_s_per_byte=_copy_s(parameters, device) / sum(p.nbytes for p in parameters),
    )


def counted_optimizer(optimizer: Optimizer, *, device: torch.device) -> OptimizerProfile:
    """Return how much state an optimizer makes, without its seconds; what it has now, if it cannot be stepped apart."""
    try:
        with undisturbed(device):
            _, sample = _step(optimizer, _sample(optimizer), device)
            of_all, of_largest = _workspace(optimizer, device)
    except Exception as error:  # of the user's own class, maybe
        log.info("The state of %s cannot be counted apart from training: %s", type(optimizer).__name__, error)
        return OptimizerProfile(state_bytes_per_byte=_state_per_byte(optimizer))
    return OptimizerProfile(
        state_bytes_per_byte=_state_per_byte(sample),
        workspace_per_byte=of_all,
        workspace_per_largest_byte=of_largest,
    )


def _sample(optimizer: Optimizer) -> list[tuple[int, ...]]:
    """Return shapes of some of the user's parameters, drawn always alike; one that is cut down if all are huge."""
    parameters = _parameters(optimizer)
    small = [p for p in parameters if p.nbytes <= _SAMPLE_BYTES]
    random.Random(0).shuffle(small)
    total = itertools.accumulate(p.nbytes for p in small)
    fitting = [tuple(p.shape) for p, size in zip(small, total, strict=True) if size <= _SAMPLE_BYTES]
    return fitting or [(_SAMPLE_BYTES // parameters[0].element_size(),)]


def _step(like: Optimizer, shapes: Sequence[tuple[int, ...]], device: torch.device) -> tuple[float, Optimizer]:
    """Return the seconds of a step over parameters of these shapes, and the optimizer that made it."""
    group = like.param_groups[0]
    dtype = next((p.dtype for p in group["params"] if p.is_floating_point()), torch.float32)
    parameters = [torch.nn.Parameter(torch.full(shape, 0.5, dtype=dtype, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    known = inspect.signature(type(like)).parameters  # groups hold more: AdamW's say that its decay is decoupled
    options = {name: group[name] for name in like.defaults if name in group and name in known}
    optimizer = type(like)(parameters, **options)
    others = torch.empty(_SWEPT_BYTES, dtype=torch.uint8, device=device)
    seconds = [_timed(optimizer.step, device, others=others) for _ in range(_WARM_UPS + _STEPS)]
    return statistics.median(seconds[_WARM_UPS:]), optimizer


def _timed(run: Callable[[], object], device: torch.device, *, others: torch.Tensor) -> float:
    """Return the seconds of a step or copy after other memory was used, as in training: caches hold none of it."""
    others.zero_()
    finish_stream(device)
    started = time.perf_counter()
    run()
    finish_stream(device)
    return time.perf_counter() - started


def _copy_s(parameters: Sequence[torch.Tensor], device: torch.device) -> float:
    """Return the seconds of copying parameters into memory that is there."""
    others = torch.empty(_SWEPT_BYTES, dtype=torch.uint8, device=device)
    copies = [parameter.detach().clone() for parameter in parameters]

    def copy() -> None:
        for content, parameter in zip(copies, parameters, strict=True):
            content.copy_(parameter.detach())

    return statistics.median(_timed(copy, device, others=others) for _ in range(_COPIES))


def _workspace(like: Optimizer, device: torch.device) -> tuple[float, float]:
    """Return the bytes that a step takes beside the state, per byte of all parameters, and per byte of the largest.

    Measured on few and on many equal parameters: what is left over from one lives on while the next one is stepped.
    """
    if is_profiling():
        log.warning("Another profiler runs, so memory that the optimizer's step needs for itself is not predicted.")
        return 0.0, 0.0
    few, many = (_risen(_step(like, [(_SQUARE, _SQUARE)] * count, device)[1], device) for count in _WATCHED)
    of_all = max(0.0, (many - few) / (_WATCHED[1] - _WATCHED[0]))
    return of_all, max(0.0, few - _WATCHED[0] * of_all)


def _risen(optimizer: Optimizer, device: torch.device) -> float:
    """Return by how many bytes memory rises in a step, per byte of the first parameter."""
    if device.type == "cuda":
        finish_stream(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        optimizer.step()
        finish_stream(device)
        risen = torch.cuda.max_memory_allocated(device) - before
    else:
        with Allocations() as seen:
            optimizer.step()
        risen = highest(seen.changes)
    return risen / _parameters(optimizer)[0].nbytes


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_per_byte(optimizer: Optimizer) -> float:
    """Return the bytes of state per byte of the parameters that have one, counters left out; 0 if there is none yet."""
    state = {parameter: values for parameter, values in optimizer.state.items() if isinstance(parameter, torch.Tensor)}
    kept = sum(v.nbytes for values in state.values() for v in values.values() if isinstance(v, torch.Tensor) and v.ndim)
    size = sum(parameter.nbytes for parameter in state)
    return kept / size if size else 0.0
