"""Optimizers that couple parameters: found by a trial step before training, because no rank has all gradients.

An optimizer of the user's own may divide by the norm of all gradients, or choose one rate for all parameters. On a rank
of a pipeline it would do that with the gradients of this rank. So copies of the parameters take one step with random
gradients, and again with gradients of the first half only, as on a rank: the first half must be the same. Optimizers of
torch treat every parameter by itself.
"""

from __future__ import annotations

import logging
from collections import defaultdict

import torch
from torch.optim import LBFGS, Optimizer

from lightning_pipe.errors import UnsupportedError

log = logging.getLogger(__name__)

_MOST_BYTES = 2**30  # of parameters whose copies take the trial step
_ROUNDING = 1e-5


def check_separable(optimizer: Optimizer) -> None:
    """Check that an optimizer steps each parameter by itself.

    Raises:
        UnsupportedError: if a parameter's step depends on the gradients of others.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    is_torchs = type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, LBFGS)
    if is_torchs or len(parameters) < 2 or sum(p.nbytes for p in parameters) > _MOST_BYTES:
        return
    half = len(parameters) // 2
    try:
        with torch.random.fork_rng(devices=[]):
            together, apart = (_stepped(optimizer, count) for count in (len(parameters), half))
    except Exception as error:  # an optimizer that needs more than gradients for a step
        log.info("%s takes no trial step: %s: %s", type(optimizer).__name__, type(error).__name__, error)
        return
    if all(torch.allclose(a, b, rtol=_ROUNDING, equal_nan=True) for a, b in zip(together[:half], apart, strict=False)):
        return
    raise UnsupportedError(
        f"{type(optimizer).__name__} steps a parameter differently if others have gradients too: it couples them, by a "
        "norm or a rate over all parameters. In a pipeline no rank has all gradients. Use an optimizer that treats "
        "every parameter by itself; gradient_clip_val clips by the norm over all ranks."
    )


def _stepped(optimizer: Optimizer, count: int) -> list[torch.Tensor]:
    """Return copies of all parameters after a step with random gradients of the first `count`."""
    torch.manual_seed(0)
    trial: Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}  # schedulers wrap it
    copies: list[torch.Tensor] = []

    def copied(group: dict[str, object]) -> dict[str, object]:
        params = group["params"]
        assert isinstance(params, list), "torch makes a list of them"
        own_copies = [torch.nn.Parameter(p.detach().clone(), p.requires_grad) for p in params]
        copies.extend(own_copies)
        return {**group, "params": own_copies}

    vars(trial).update(own, state=defaultdict(dict), param_groups=[copied(group) for group in optimizer.param_groups])
    gradients = [torch.randn_like(copy) for copy in copies]
    for copy, gradient in zip(copies[:count], gradients, strict=False):
        copy.grad = gradient if copy.requires_grad else None
    trial.step(lambda: torch.zeros(()))  # type: ignore[arg-type,return-value]
    return [copy.detach() for copy in copies]
