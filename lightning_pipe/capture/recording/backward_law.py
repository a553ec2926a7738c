"""Law of a backward: whether gradients are a linear function of the gradient that comes in.

Micro-batches give the loss a share of its gradient, and add up what comes back. That is the gradient of the batch if
every backward is linear. A custom `autograd.Function` or a hook may do otherwise:

    adds      the gradient of an auxiliary loss, whatever comes in      zero gives something
    scales    by the norm of what comes in, takes signs, cuts off       half gives something else than a half

Three runs tell: with the gradient of the loss, with half of it, and with zero.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import nn

from lightning_pipe.capture.torch_private import gradient_hooks

WEIGHTS = (1.0, 0.5, 0.0)  # powers of two, by which no rounding changes


def nonlinear(whole: Mapping[str, float], half: Mapping[str, float], zero: Mapping[str, float], *, eps: float) -> str:
    """Name a parameter whose gradient is no linear function of the loss's gradient; "" if there is none.

    Args:
        whole, half, zero: norms of gradients by parameter, for each of `WEIGHTS`.
        eps: precision of the loss; devices may add in another order every time.
    """
    rounding = eps**0.25
    largest = max(filter(math.isfinite, whole.values()), default=0.0)
    for name, norm in whole.items():
        is_halved = abs(half[name] - norm / 2) <= rounding * max(norm, rounding * largest)
        if math.isfinite(norm) and not (is_halved and zero[name] == 0):
            return name
    return ""


def gradient_norms(loss: torch.Tensor, parameters: Mapping[str, nn.Parameter], weight: float) -> Mapping[str, float]:
    """Run the backward of a loss with this weight, and return the norm of every parameter's gradient; 0 without one.

    Hooks on parameters do not run: they are for the whole gradient of a batch.

    Args:
        loss: to be differentiated.
        parameters: by name; they have no gradients, before and after.
        weight: gradient of the loss.
    """
    norms: dict[str, torch.Tensor] = {}

    def note(name: str, parameter: torch.Tensor) -> None:  # and let the gradient go
        assert parameter.grad is not None, "it has just been accumulated"
        gradient = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
        norms[name] = norms.get(name, 0) + gradient.norm()
        parameter.grad = None

    with _no_gradient_hooks(parameters):
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        hooks = [p.register_post_accumulate_grad_hook(partial(note, name)) for name, p in trained.items()]
        try:
            loss.backward(torch.full_like(loss, weight))
        finally:
            for hook in hooks:
                hook.remove()
    return defaultdict(float, {name: float(norm) for name, norm in norms.items()})


@contextlib.contextmanager
def _no_gradient_hooks(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Take the user's hooks off parameters inside."""
    tables = [table for parameter in parameters.values() for table in gradient_hooks(parameter)]
    hooks = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, content in zip(tables, hooks, strict=True):
            table.update(content)
