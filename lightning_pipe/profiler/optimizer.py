"""What does a step of the user's optimizer cost? Measured on another one of its kind, over parameters made up for it.

    seconds of a step = fixed_s + seconds_per_tensor * parameters + seconds_per_byte * their bytes

from three sets of parameters: a single tiny one, many tiny ones, a few large ones. The bytes of state per byte of
parameters are those that the large ones have after some steps. The user's optimizer is only read: its class, and the
options of its first group.

Left out: options that differ between groups, and what a step does every so many steps only.
"""

from __future__ import annotations

import inspect
import logging
import statistics
import time
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lightning_pipe.core.profile import OptimizerProfile

log = logging.getLogger(__name__)

_MANY, _TINY = 100, 64  # parameters, and elements of each
_FEW, _LARGE = 4, 2**20
_STEPS = 7
_WARM_UPS = 2  # the first step makes the state


def profile_optimizer(optimizer: Optimizer, *, device: torch.device) -> OptimizerProfile:
    """Return the costs of a step.

    An optimizer that cannot be made or stepped like this (one whose class takes other arguments, or whose step needs a
    closure) is said once, and counts as taking no time and as much state as it has now.

    Args:
        optimizer: the user's; it is not changed.
        device: where parameters will be.
    """
    try:
        one_s, _ = _step(optimizer, (_TINY,), device)
        many_s, _ = _step(optimizer, (_TINY,) * _MANY, device)
        large_s, large = _step(optimizer, (_LARGE,) * _FEW, device)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        log.warning(
            "A step of %s cannot be timed apart from training, so it is predicted to take no time: %s",
            type(optimizer).__name__,
            error,
        )
        return OptimizerProfile(state_bytes_per_byte=_state_per_byte(optimizer))
    per_tensor = max(0.0, (many_s - one_s) / (_MANY - 1))
    fixed = max(0.0, one_s - per_tensor)
    size = sum(parameter.nbytes for parameter in _parameters(large))
    return OptimizerProfile(
        seconds_per_byte=max(0.0, large_s - fixed - _FEW * per_tensor) / size,
        seconds_per_tensor=per_tensor,
        fixed_s=fixed,
        state_bytes_per_byte=_state_per_byte(large),
    )


def _step(like: Optimizer, sizes: Sequence[int], device: torch.device) -> tuple[float, Optimizer]:
    """Return the seconds of a step over parameters of these sizes, and the optimizer that made it."""
    group = like.param_groups[0]
    dtype = next((p.dtype for p in group["params"] if p.is_floating_point()), torch.float32)
    parameters = [torch.nn.Parameter(torch.full((size,), 0.5, dtype=dtype, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    known = inspect.signature(type(like)).parameters  # groups hold more: AdamW's say that its decay is decoupled
    options = {name: group[name] for name in like.defaults if name in group and name in known}
    optimizer = type(like)(parameters, **options)
    return statistics.median([_timed(optimizer, device) for _ in range(_WARM_UPS + _STEPS)][_WARM_UPS:]), optimizer


def _timed(optimizer: Optimizer, device: torch.device) -> float:
    _finish(device)
    started = time.perf_counter()
    optimizer.step()
    _finish(device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _state_per_byte(optimizer: Optimizer) -> float:
    """Return the bytes of state per byte of the parameters that have one; 0 if there is none yet."""
    state = {parameter: values for parameter, values in optimizer.state.items() if isinstance(parameter, torch.Tensor)}
    kept = sum(v.nbytes for values in state.values() for v in values.values() if isinstance(v, torch.Tensor))
    size = sum(parameter.nbytes for parameter in state)
    return kept / size if size else 0.0
