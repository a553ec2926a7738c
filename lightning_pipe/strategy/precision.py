"""How are gradients clipped when no rank has all of them? With the norm that one device would compute.

Every parameter's norm travels once, in its place in the optimizer's order; then each rank combines all of them exactly
as `torch.nn.utils.clip_grad_norm_` does. A parameter that several ranks hold counts once. Clipping by value concerns
every element for itself and needs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision

from lightning_pipe.strategy.control import Control
from lightning_pipe.strategy.optimizer import Groups
from lightning_pipe.strategy.weights import Weights


class Clipper:
    """Clip the gradients of one rank by the norm over all ranks.

    Args:
        groups: all parameters in the optimizer's order.
        weights: which of them are here.
        control: to the other ranks.
        device: where the norms are combined, on all ranks alike.
    """

    def __init__(self, groups: Groups, *, weights: Weights, control: Control, device: torch.device) -> None:
        self._groups, self._weights, self._control, self._device = groups, weights, control, device

    def install(self, plugin: Precision) -> None:
        """Replace the plug-in's clipping by norm; everything else of it stays."""
        vars(plugin)["clip_grad_by_norm"] = self.clip_grad_by_norm

    @staticmethod
    def remove(plugin: Precision) -> None:
        """Give the plug-in its own clipping back."""
        vars(plugin).pop("clip_grad_by_norm", None)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Scale the gradients of this rank so that the norm of all is at most `clip_val`."""
        here = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grads_with_norm_(here, float(clip_val), self.total_norm())

    def total_norm(self) -> torch.Tensor:
        """Return the norm of all gradients, the same on all ranks."""
        parameters = self._groups.parameters()
        if self._control.ranks == 1:
            return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norms, present = torch.zeros(2, len(parameters), dtype=torch.float64)
        mine = [(k, p.grad) for k, p in enumerate(parameters) if p.grad is not None and self._speaks(p)]
        if mine:
            places = [k for k, _ in mine]
            own = [torch.nn.utils.get_total_norm([gradient]).to(torch.float64) for _, gradient in mine]
            norms[places], present[places] = torch.stack(own).cpu(), 1.0
        norms, present = self._control.sum(torch.stack([norms, present]), what="the norms of all gradients")
        found = [n.to(self._device, p.dtype) for n, here, p in zip(norms, present, parameters, strict=True) if here]
        return torch.linalg.vector_norm(torch.stack(found)) if found else torch.zeros((), device=self._device)

    def _speaks(self, parameter: torch.Tensor) -> bool:
        name = self._weights.name_of(parameter)
        return self._control.rank == (0 if name is None else self._weights.speaker(name))
