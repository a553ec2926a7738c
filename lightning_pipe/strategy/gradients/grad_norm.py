"""Gradient norm over all ranks, combined as `torch.nn.utils.clip_grad_norm_` does.

Norms          known to the host
DeviceNorms    added up on the device, where gradients are scaled by them: nobody waits for them on the host
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lightning_pipe.runtime.waiting import Wait

_ROUNDINGS = 16  # roundings by which a norm may differ from the exact one, as a device computes it


@dataclass(frozen=True)
class Norms:
    """Norms of the gradients of all ranks, which may be under way.

    Attributes:
        table: on the host in float64: by parameter its norm, then whether it has a gradient; shape [2, parameters].
        types: element type of every parameter.
        device: where they are combined.
        wait: until they are there.
    """

    table: torch.Tensor
    types: tuple[torch.dtype, ...]
    device: torch.device
    wait: Wait

    def _found(self) -> list[tuple[torch.Tensor, torch.dtype]]:
        norms, present = self.table
        return [(norm, kind) for norm, here, kind in zip(norms, present, self.types, strict=True) if here]

    def of_each(self) -> list[torch.Tensor | None]:
        """Return the norms in the order of parameters; None where there is no gradient."""
        norms, present = self.table
        return [
            norm.to(self.device, kind) if here else None
            for norm, here, kind in zip(norms, present, self.types, strict=True)
        ]

    def total(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of all gradients, as one device would compute it."""
        found = [norm.to(self.device, kind) for norm, kind in self._found()]
        return torch.linalg.vector_norm(torch.stack(found), norm_type) if found else torch.zeros((), device=self.device)

    def are_below(self, limit: float) -> bool:
        """Return whether surely nothing has to be clipped: the same on all ranks, whatever their devices."""
        found = self._found()
        rounding = max((torch.finfo(kind).eps for _, kind in found), default=0.0)
        total = math.hypot(*(float(norm) for norm, _ in found))
        return total * (1 + _ROUNDINGS * rounding) < limit  # not if it is no number


@dataclass(frozen=True)
class DeviceNorms:
    """Norms of the gradients of all ranks, on a device.

    Attributes:
        norms: in float64, by parameter; 0 where there is no gradient.
        types: element type of every parameter.
        wait: until they are there, for what the device does from then on.
    """

    norms: torch.Tensor
    types: tuple[torch.dtype, ...]
    wait: Wait

    def total(self) -> torch.Tensor:
        """Return the norm of all gradients, as one device would compute it."""
        norms = self.norms
        if len({*self.types}) == 1:  # by one launch instead of one for each parameter
            norms = norms.to(self.types[0])
        elif self.types:
            norms = torch.stack([norm.to(kind) for norm, kind in zip(norms, self.types, strict=True)])
        total: torch.Tensor = torch.linalg.vector_norm(norms)
        return total
