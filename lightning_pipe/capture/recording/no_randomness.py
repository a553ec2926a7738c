"""Runs without randomness, so that a batch and its micro-batches can be compared: they would draw other numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from lightning_pipe.capture.torch_private import TorchDispatchMode


class NoRandomness(TorchDispatchMode):
    """Let random operations draw constants, the same for all samples, and dropout drop nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation without randomness."""
        kwargs = kwargs or {}
        names = _argument_names(func)
        for name in ("dropout_p", "dropout"):  # of fused attention and recurrent layers
            if name in names:
                place = names.index(name)
                args = (*args[:place], 0.0, *args[place + 1 :]) if place < len(args) else args
                kwargs = {**kwargs, name: 0.0} if name in kwargs else kwargs
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func.__name__.partition(".")[0].removesuffix("_")
        if name == "native_dropout":
            keep = 1 - args[1] if args[2] is not False else 1.0
            return args[0] / keep if keep else torch.zeros_like(args[0]), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **kwargs)
        if name == "randperm":
            return result.copy_(torch.arange(result.numel(), device=result.device))
        if name in ("bernoulli", "bernoulli_functional"):
            return result.fill_(1)
        if name in ("multinomial", "poisson", "binomial"):
            return result.fill_(0)
        if name == "randint" and "low" in names:
            return result.fill_(args[names.index("low")])
        if name.startswith(("rand", "normal", "uniform", "exponential", "cauchy", "geometric", "log_normal")):
            return result.fill_(0.5 if result.is_floating_point() else 0)
        return result


@functools.cache
def _argument_names(operator: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator._schema.arguments)
