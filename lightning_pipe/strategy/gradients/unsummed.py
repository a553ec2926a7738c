"""Gradients that no program has summed: those of a window of accumulation whose last batch is skipped."""

from __future__ import annotations

import torch

from lightning_pipe.strategy.parameters.weights import Weights


def sum_gradients(weights: Weights) -> None:
    """Sum the gradients of parameters that several ranks hold over these ranks; on all ranks together."""
    control = weights.control
    shared = [
        name for name in weights.parameters if sum(weights.held_by(name, (rank,)) for rank in range(control.ranks)) > 1
    ]
    mine = [weights.parameters[name].grad if weights.has(name) else None for name in shared]
    found = control.sum(torch.tensor([float(one is not None) for one in mine]), what="which gradients there are")
    for name, one, count in zip(shared, mine, found.tolist(), strict=True):
        if count:
            parameter = weights.parameters[name]
            empty = torch.zeros(parameter.shape, dtype=parameter.dtype)
            total = control.sum(empty if one is None else one.to("cpu", copy=True), what=f"the gradient of {name}")
            if weights.has(name):
                parameter.grad = total.to(parameter.device)
