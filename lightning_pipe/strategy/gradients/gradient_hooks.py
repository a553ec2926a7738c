"""Hooks on the gradients of parameters, run once per batch on the gradient of the whole batch, as on one device.

A program adds to `grad` micro-batch by micro-batch, and rank by rank. So while one runs, hooks are taken off their
parameters; afterwards, on every rank that holds a parameter,

    1. hooks of `Tensor.register_hook`                              change the gradient of this batch
    2. the gradient of the batches before is added                  under accumulation
    3. hooks of `Tensor.register_post_accumulate_grad_hook`         see the sum

A hook that draws random numbers draws the same on all replicas. Hooks may be registered at any time, on all ranks: what
other ranks hold keeps its hooks too, and runs none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lightning_pipe.capture.replayed.module_scope import keyed
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.torch_private import gradient_hooks, hooked
from lightning_pipe.errors import UnsupportedError
from lightning_pipe.strategy.parameters.weights import Weights

Hook = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class _Taken:
    """The hooks of one parameter, and the tables that they were taken from."""

    parameter: torch.Tensor
    tables: tuple[dict[Any, Hook], ...]
    hooks: tuple[dict[Any, Hook], ...]

    def put_back(self) -> None:
        for table, hooks in zip(self.tables, self.hooks, strict=True):
            for key, hook in hooks.items():
                table.setdefault(key, hook)


class GradientHooks:
    """The gradient hooks of one module's parameters.

    Args:
        weights: its parameters.
        device: where this rank computes.
    """

    def __init__(self, weights: Weights, *, device: torch.device) -> None:
        self._weights, self._device = weights, device

    @property
    def is_needed(self) -> bool:
        """Return whether any parameter has a hook; the same on all ranks."""
        return bool(hooked(self._weights.parameters.values()))

    @contextlib.contextmanager
    def taken_off(self) -> Iterator[Mapping[str, _Taken]]:
        """Take all hooks off their parameters inside; yield them by name."""
        taken: dict[str, _Taken] = {}
        for parameter in hooked(self._weights.parameters.values()):
            tables, name = gradient_hooks(parameter), self._weights.name_of(parameter)
            assert name is not None, "it is one of the weights"
            taken[name] = _Taken(parameter, tables, tuple(dict(table) for table in tables))
            for table in tables:
                table.clear()
        try:
            yield taken
        finally:
            for one in taken.values():
                one.put_back()

    @contextlib.contextmanager
    def around_batch(self, *, seed: int, number: int, summed: bool) -> Iterator[None]:
        """Run a training program inside, and the hooks after it.

        Args:
            seed: seed of random numbers.
            number: number of the batch.
            summed: whether gradients that are there already are those of all ranks.

        Raises:
            UnsupportedError: if a hook was registered in the middle of an accumulation.
        """
        with self.taken_off() as taken:
            before = {name: one.parameter.grad for name, one in taken.items()}
            if not summed and any(gradient is not None for gradient in before.values()):
                raise UnsupportedError(
                    f"A gradient hook was registered on {next(iter(taken))} in the middle of an accumulation of "
                    "batches. Register it before training, or after an optimizer step."
                )
            for one in taken.values():
                one.parameter.grad = None
            yield
        for place, (name, one) in enumerate(taken.items()):
            self._finish(one, before[name], RandomKey(seed, number, -1 - place))

    def _finish(self, taken: _Taken, before: torch.Tensor | None, key: RandomKey) -> None:
        """Run the hooks of one parameter."""
        parameter = taken.parameter
        if parameter.grad is None:
            parameter.grad = before
            return
        on_gradient, on_sum = taken.hooks
        with torch.no_grad(), keyed(key, self._device):
            gradient = parameter.grad
            for hook in on_gradient.values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            parameter.grad = gradient if before is None else before.add_(gradient)
            for hook in on_sum.values():
                hook(parameter)
