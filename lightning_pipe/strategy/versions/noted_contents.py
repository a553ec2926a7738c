"""Contents of tensors at one moment, so that a later look tells who has been written to.

Contents are compared: `.data`, NumPy, `set_` and a new tensor in the place of another one move no version counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from lightning_pipe.runtime.transport.collectives import as_bytes


class NotedContents:
    """Copies of tensors, by name.

    Args:
        tensors: as they are now.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def unlike(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return by name whether the tensors have another content now."""
        return {name: unlike(copy, tensors[name]) for name, copy in self._copies.items()}

    def put_back(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the contents to the tensors."""
        with torch.no_grad():
            for name, copy in self._copies.items():
                tensors[name].copy_(copy)


def unlike(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    """Return whether two tensors differ in form or in any bit, on their device, so that nobody waits for it."""
    if (one.shape, one.dtype, one.device) != (two.shape, two.dtype, two.device):
        return torch.tensor(True)
    first, second = (as_bytes(tensor.detach().contiguous()) for tensor in (one, two))
    return torch.tensor(not torch.equal(first, second)) if one.device.type == "cpu" else (first != second).any()


def any_of(flags: Iterable[torch.Tensor]) -> torch.Tensor | float:
    """Return whether any flag is set: on the device where some are there."""
    flags = [*flags]
    device = next((flag.device for flag in flags if flag.device.type != "cpu"), None)
    return torch.stack([flag.to(device or flag.device, non_blocking=True) for flag in flags]).any() if flags else 0.0
