"""Snapshot of gradients, state and what is trained, so that a batch can be run again by another route."""

from __future__ import annotations

import torch

from lightning_pipe.capture.steps.stage_program import Split
from lightning_pipe.strategy.parameters.stand_ins import Guarded
from lightning_pipe.strategy.parameters.weights import Weights


class StateSnapshot:
    """Gradients, buffers and written parameters of one rank at one moment, and which parameters are trained.

    It owns copies and hands out copies, so that it can be restored several times.

    Args:
        weights: where they live.
        split: the step that is about to run; it tells which parameters the step writes to.
    """

    def __init__(self, weights: Weights, split: Split) -> None:
        self._weights = weights
        self._gradients = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in weights.parameters.items()
        }
        by_step = (name for program in split.stages for name in (*program.mutations, *program.written))
        names = {*map(weights.first_name, by_step)}
        written = {name: parameter for name, parameter in weights.parameters.items() if name in names}
        state = [*weights.buffers.items(), *written.items()]
        self._state = [(name, tensor.detach().clone()) for name, tensor in state if not isinstance(tensor, Guarded)]
        self._is_trained = {name: parameter.requires_grad for name, parameter in weights.parameters.items()}

    def trained_since(self) -> list[str]:
        """Name the parameters that are trained now and were not."""
        return [name for name, p in self._weights.parameters.items() if p.requires_grad > self._is_trained[name]]

    def forget_frozen(self) -> None:
        """Drop the gradients, if they are new, of parameters that are trained no more."""
        for name, parameter in self._weights.parameters.items():
            if parameter.requires_grad < self._is_trained[name] and self._gradients[name] is None:
                parameter.grad = None

    def restore(self) -> None:
        """Put them back."""
        for name, is_trained in self._is_trained.items():
            self._weights.parameters[name].requires_grad_(is_trained)
        self.restore_gradients()
        with torch.no_grad():
            for name, content in self._state:
                self._weights.write(name, content)

    def restore_gradients(self) -> None:
        """Put gradients back."""
        for name, gradient in self._gradients.items():
            self._weights.parameters[name].grad = None if gradient is None else gradient.clone()
