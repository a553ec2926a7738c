"""Snapshot of gradients and buffers, so that a batch can be run again by another route."""

from __future__ import annotations

import torch

from lightning_pipe.strategy.parameters.stand_ins import Guarded
from lightning_pipe.strategy.parameters.weights import Weights


class StateSnapshot:
    """Gradients and buffers of one rank at one moment.

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

    def restore(self) -> None:
        """Put them back."""
        with torch.no_grad():
            for name, gradient in self._gradients.items():
                self._weights.parameters[name].grad = gradient
            for name, buffer in self._buffers.items():
                self._weights.buffers[name].copy_(buffer)
