"""Optimizers that couple parameters: found by trial steps before training, because no rank has all gradients.

An optimizer of the user's own may divide by the norm of all gradients, or choose one rate for all parameters. On a rank
of a pipeline it would do that with the gradients of this rank. So copies of a corner of every parameter take a few
steps with random gradients, and again with gradients of some of them only, as on a rank: of the first half, of the
second, and of every second one, since parameters may be coupled in groups. Those must be the same. A first step alone
may couple nothing, nor steps without a direction: a rate for all may be found from how far they have come (Prodigy).
Optimizers of torch treat every parameter by itself.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_pipe.errors import UnsupportedError

log = logging.getLogger(__name__)

_MOST = 8  # numbers along each dimension of a parameter that take the trial steps
_ROUNDING = 1e-5
_STEPS = 10


def check_separable(optimizer: Optimizer, ranks: int) -> None:
    """Check that an optimizer steps each parameter by itself.

    Args:
        optimizer: what is to train a pipeline.
        ranks: how many there are.

    Raises:
        UnsupportedError: if a parameter's step depends on the gradients of others.
    """
    name = type(optimizer).__name__
    advice = f'layout="{ranks}" with shard_optimizer="off" trains data parallel, where every rank has all gradients.'
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_torchs = type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS)
    if is_torchs or len(parameters) < 2:
        return
    places = range(len(parameters))
    half = len(parameters) // 2
    try:
        together = _stepped(optimizer, set(places))
    except Exception as error:  # an optimizer that needs more than gradients for a step
        log.info("%s takes no trial step: %s: %s", name, type(error).__name__, error)
        return
    for some in (places[:half], places[half:], places[::2]):
        try:
            apart = _stepped(optimizer, {*some})
        except Exception as error:
            raise UnsupportedError(
                f"{name} fails where some parameters have no gradient ({type(error).__name__}: {error}), and in a "
                f"pipeline no rank has all gradients. Let it leave those alone whose gradient is None. {advice}"
            ) from error
        if not all(torch.allclose(together[k], apart[k], rtol=_ROUNDING, equal_nan=True) for k in some):
            raise UnsupportedError(
                f"{name} steps a parameter differently if others have gradients too: it couples them, by a norm or a "
                "rate over all parameters. In a pipeline no rank has all gradients. Use an optimizer that treats every "
                f"parameter by itself; gradient_clip_val clips by the norm over all ranks. {advice}"
            )


def _stepped(optimizer: Optimizer, places: set[int]) -> list[torch.Tensor]:
    """Return corners of all parameters after some steps with random gradients of those at these places."""
    trial, corners = _copied(optimizer)
    with torch.random.fork_rng(devices={corner.device for corner in corners if corner.device.type == "cuda"}):
        torch.manual_seed(0)
        directions = [torch.randn_like(corner) for corner in corners]  # before the optimizer draws any
        drawn = [[one + torch.randn_like(one) / 4 for one in directions] for _ in range(_STEPS)]
        for gradients in drawn:
            for place, (corner, gradient) in enumerate(zip(corners, gradients, strict=True)):
                corner.grad = gradient if corner.requires_grad and place in places else None
            trial.step(lambda: torch.zeros(()))  # type: ignore[arg-type,return-value]
        return [corner.detach() for corner in corners]


def _copied(optimizer: Optimizer) -> tuple[Optimizer, list[torch.Tensor]]:
    """Return an optimizer of the same kind and options, of corners of the parameters, and these.

    What it keeps for itself in dicts, lists and optimizers that it wraps is copied; other objects are shared.
    """
    corners: list[torch.Tensor] = []
    memo: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = [nn.Parameter(_corner(p), p.requires_grad) for p in group["params"]]
        corners += own
        memo |= {id(p): corner for p, corner in zip(group["params"], own, strict=True)}
        groups.append({**group, "params": own})
        memo[id(group)] = groups[-1]
    memo[id(optimizer.param_groups)] = groups
    trial: Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in ("state", "step"):  # schedulers wrap the second
            continue
        is_own = isinstance(value, list | dict | set | deque | torch.Tensor | Optimizer) and "_hooks" not in name
        vars(trial)[name] = deepcopy(value, memo) if is_own else value
    vars(trial).update(state=defaultdict(dict), param_groups=groups)
    return trial, corners


def _corner(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of the first few numbers along each dimension."""
    return parameter.detach()[tuple(slice(_MOST) for _ in parameter.shape)].clone()
