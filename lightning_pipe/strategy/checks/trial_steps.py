"""Trial steps of an optimizer, as on one rank of a pipeline: a copy of it, on corners of all parameters.

Parameters of other ranks are stand-ins. Gradients are random, and change with the weights, so that a closure that is
called again after these have moved gives others. Learning rates are raised: a schedule may begin at 0.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipe.capture.torch_private import TorchDispatchMode
from lightning_pipe.strategy.parameters.inner_optimizers import (
    copied,
    inner_optimizers,
    parameters_of,
    state_tables,
    with_tensors,
)
from lightning_pipe.strategy.parameters.stand_ins import occupy, vacate

_MOST = 8  # numbers along each dimension of a tensor that take the trial steps
_LEAST_RATE = 0.01


class TrialSteps:
    """A copy of an optimizer that takes trial steps.

    Args:
        optimizer: the user's; it is not changed.
        places: in the order of `parameters_of`, those whose gradients are here; the other trained ones are elsewhere.
        device: where the copy steps; some optimizers do so on a GPU only.

    Attributes:
        optimizer: the copy.
        corners: its parameters.
        trained: places of those that are trained.
        calls: how often it has called its closure in a step, at most.
    """

    def __init__(self, optimizer: Optimizer, places: Collection[int], *, device: torch.device) -> None:
        self.optimizer, memo = copied(optimizer, partial(_corner, device=device))
        self.corners: list[Any] = [memo[id(parameter)] for parameter in parameters_of(optimizer)]
        self._places, self.calls = frozenset(places), 0
        with torch.random.fork_rng(devices={corner.device for corner in self.corners if corner.is_cuda}):
            torch.manual_seed(0)
            trained = {place: corner for place, corner in enumerate(self.corners) if corner.requires_grad}
            self._directions = {place: torch.randn_like(corner) for place, corner in trained.items()}
        self._starts = {place: corner.detach().clone() for place, corner in trained.items()}
        self.trained = frozenset(trained)
        for place in self.trained - self._places:
            corner = self.corners[place]
            vacate(corner, f"#{place}", ranks=(1,), rank=0, device=corner.device)
        for inner in inner_optimizers(self.optimizer):
            for group in inner.param_groups:
                _raise_rate(group, getattr(inner, "defaults", {}))
        self._switch("train")

    def _switch(self, *methods: str) -> None:
        """Let weights be those of training or of evaluation, where these differ."""
        for method in methods:
            if callable(switch := getattr(self.optimizer, method, None)):
                switch()

    def take(self, steps: range) -> None:
        """Take steps, and evaluate; those of one number have the same gradients in all trials."""
        with torch.random.fork_rng(devices={corner.device for corner in self.corners if corner.is_cuda}):
            for number in steps:
                torch.manual_seed(1 + number)
                noise = {place: torch.randn_like(one) / 4 for place, one in self._directions.items()}
                self._step(number, noise)
        self._switch("eval", "train")

    def _step(self, number: int, noise: dict[int, torch.Tensor]) -> None:
        calls = 0

        def give_gradients() -> None:
            for place in self._places:
                corner = self.corners[place].detach()
                gradient = self._directions[place] + noise[place] + (corner - self._starts[place])
                self.corners[place].grad = gradient

        def closure() -> torch.Tensor:
            nonlocal calls
            calls += 1
            self.optimizer.zero_grad()
            give_gradients()
            return torch.tensor(1 / (1 + number + calls))

        give_gradients()  # for a step that leaves the closure to a hook
        with nullcontext() if number else _NoCollectives():  # type: ignore[no-untyped-call]
            self.optimizer.step(closure=closure)  # type: ignore[arg-type]  # as Lightning calls it
        self.calls = max(self.calls, calls)

    def moved(self, place: int) -> torch.Tensor:
        """Return by how much a corner has moved."""
        moved: torch.Tensor = self.corners[place].detach() - self._starts[place]
        return moved

    def join(self, other: TrialSteps) -> None:
        """Get weights and states from a trial that had all gradients, as other ranks give them; have all from now on.

        The states of parameters that were here are replaced, too: what was drawn for them differs.
        """
        for place in self.trained - self._places:
            occupy(self.corners[place], other.corners[place].detach().clone())
        for mine, theirs in zip(state_tables(self.optimizer), state_tables(other.optimizer), strict=True):
            for place in self.trained:
                mine.pop(self.corners[place], None)
                if (entry := theirs.get(other.corners[place])) is not None:
                    mine[self.corners[place]] = with_tensors(entry, torch.clone)
        self._places = self.trained


class _NoCollectives(TorchDispatchMode):
    """Refuse to exchange tensors with other ranks, which take no trial steps."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what is called."""
        if func.namespace == "c10d":
            raise RuntimeError(f"its step exchanges tensors with other ranks, by {func}")
        return func(*args, **(kwargs or {}))


def _corner(tensor: torch.Tensor, *, device: torch.device) -> torch.Tensor:
    """Return a copy of the first few numbers along each dimension, on the device; counters stay where they are."""
    corner = tensor.detach()[tuple(slice(_MOST) for _ in tensor.shape)].clone()
    corner = corner.to(device) if isinstance(tensor, nn.Parameter) or tensor.ndim else corner
    return nn.Parameter(corner, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else corner


def _raise_rate(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Let a group have the largest rate that is known of it: a schedule may begin at 0."""
    rate = group.get("lr")
    least = max(float(known.get(name) or 0.0) for known, name in ((group, "initial_lr"), (defaults, "lr")))
    least = max(least, _LEAST_RATE)
    if isinstance(rate, torch.Tensor):
        rate.clamp_(min=least)
    elif isinstance(rate, (int, float)):
        group["lr"] = max(rate, least)
