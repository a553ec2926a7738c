"""Gradient clipping where no rank has all gradients, with the norm that one device would compute.

Every parameter's norm travels once, in its place in the optimizer's order (`norms`). A parameter that several ranks
hold counts once. Where every rank has all gradients, nothing travels. Where messages travel from device to device, so
do norms for clipping: the host waits for none. Clipping by value concerns every element for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_pipe.capture.torch_private import norms_of_each
from lightning_pipe.lightning_names import Precision
from lightning_pipe.runtime.transport.protocol import Transport
from lightning_pipe.strategy.gradients.grad_norm import DeviceNorms, Norms
from lightning_pipe.strategy.gradients.post_validation import PostValidation
from lightning_pipe.strategy.parameters.optimizer import Groups
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.ranks.connections import Connections

_WHAT = "the norms of all gradients"


class Clipper:
    """Clip the gradients of one rank by the norm over all ranks.

    Args:
        groups: all parameters in the optimizer's order.
        weights: which of them are here.
        links: to the other ranks.
        device: where the norms are combined, on all ranks alike.
        later: looks at the norm after the step; None waits for it.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        weights: Weights,
        links: Connections,
        device: torch.device,
        later: PostValidation | None = None,
    ) -> None:
        self._groups, self._weights, self._links, self._device = groups, weights, links, device
        self._control, self._later = links.control, later

    def install(self, plugin: Precision) -> None:
        """Replace the plug-in's clipping; everything else of it stays."""
        vars(plugin)["clip_grad_by_norm"] = self.clip_grad_by_norm
        vars(plugin)["clip_grad_by_value"] = self.clip_grad_by_value

    @staticmethod
    def remove(plugin: Precision) -> None:
        """Give the plug-in its own clipping back."""
        vars(plugin).pop("clip_grad_by_norm", None)
        vars(plugin).pop("clip_grad_by_value", None)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Scale the gradients of this rank so that the norm of all is at most `clip_val`."""
        here = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._control.ranks == 1 or (self._later is None and self._has_all()):
            torch.nn.utils.clip_grad_norm_(here, clip_val)
            return
        on_device = self._links.on_device
        if self._later is None and on_device is not None:
            self._scale(here, clip_val, self._post_on_device(on_device))
            return
        norms = self.post_norms()
        if self._later is not None and self._later.goes_on(self._groups.optimizer, float(clip_val), norms):
            return
        self._scale(here, clip_val, norms)

    @staticmethod
    def clip_grad_by_value(optimizer: Any, clip_val: int | float) -> None:
        """Limit every element of the gradients of this rank, which may have none: torch's own refuses an empty list."""
        here = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if here:
            torch.nn.utils.clip_grad_value_(here, clip_val)

    def norms(self, norm_type: float = 2.0) -> Norms:
        """Return the norms of the gradients of all ranks; on all ranks together."""
        norms = self.post_norms(norm_type)
        self._control.wait(norms.wait)
        return norms

    def parameters(self) -> list[torch.Tensor]:
        """List the parameters in the order of norms."""
        return self._groups.parameters()

    def post_norms(self, norm_type: float = 2.0) -> Norms:
        """Begin to tell all ranks the norms of the gradients of all."""
        parameters = self._groups.parameters()
        table = torch.zeros(2, len(parameters), dtype=torch.float64)
        places, own = self._local_norms(norm_type)
        if own:
            table[0, places], table[1, places] = torch.stack([norm.to(torch.float64) for norm in own]).cpu(), 1.0
        wait = self._control.begin_sum(table, what=_WHAT)
        return Norms(table, _types(parameters), self._device, wait)

    def _post_on_device(self, over: Transport) -> DeviceNorms:
        """Begin to add the norms of the gradients of all ranks on the device."""
        parameters = self._groups.parameters()
        table = torch.zeros(len(parameters), dtype=torch.float64, device=self._device)
        places, own = self._local_norms(2.0)
        if own:
            index = torch.tensor(places).to(self._device, non_blocking=True)
            table.index_copy_(0, index, torch.stack(own).to(table))
        return DeviceNorms(table, _types(parameters), self._control.begin_sum(table, what=_WHAT, over=over))

    def _local_norms(self, norm_type: float) -> tuple[list[int], list[torch.Tensor]]:
        """Return the norms that this rank tells, and the places of their parameters."""
        parameters = enumerate(self._groups.parameters())
        mine = [(k, p.grad) for k, p in parameters if p.grad is not None and self._speaks(p)]
        gradients = [gradient for _, gradient in mine]
        return [k for k, _ in mine], norms_of_each(gradients, norm_type) if gradients else []

    def _scale(self, parameters: Sequence[torch.Tensor], clip_val: int | float, norms: Norms | DeviceNorms) -> None:
        self._control.wait(norms.wait)
        torch.nn.utils.clip_grads_with_norm_(parameters, float(clip_val), norms.total())

    def _has_all(self) -> bool:
        """Return whether every rank has all gradients, which are the same there (data parallel)."""
        names = (self._weights.name_of(parameter) for parameter in self._groups.parameters())
        return not self._weights.sharing() and all(self._weights.is_everywhere(n) for n in names if n is not None)

    def _speaks(self, parameter: torch.Tensor) -> bool:
        name = self._weights.name_of(parameter)
        return self._control.rank == (0 if name is None else self._weights.owner(name))


def _types(parameters: Sequence[torch.Tensor]) -> tuple[torch.dtype, ...]:
    return tuple(parameter.dtype for parameter in parameters)
