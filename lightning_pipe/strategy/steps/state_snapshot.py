"""Snapshot of gradients, buffers and what is trained, so that a batch can be run again by another route."""

from __future__ import annotations

import torch

from lightning_pipe.strategy.parameters.stand_ins import Guarded
from lightning_pipe.strategy.parameters.weights import Weights


class StateSnapshot:
    """Gradients and buffers of one rank at one moment, and which parameters are trained.

    Args:
        weights: where they live.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._gradients = {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in weights.parameters.items()
        }
        self._buffers = {
            name: buffer.clone() for name, buffer in weights.buffers.items() if not isinstance(buffer, Guarded)
        }

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
            for name, buffer in self._buffers.items():
                self._weights.buffers[name].copy_(buffer)

    def restore_gradients(self) -> None:
        """Put gradients back."""
        for name, gradient in self._gradients.items():
            self._weights.parameters[name].grad = gradient
