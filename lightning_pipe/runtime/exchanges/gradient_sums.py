"""Gradients of parameters, added to `.grad` one by one as a half makes them: there is one copy of them in all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, reduce

import torch

from lightning_pipe.runtime.exchanges.slicing import Content


class Sums:
    """Add the gradients that one run of a half makes.

    Args:
        parameters: by canonical name.
        given: what the half reads; memory that it shares with a gradient is not taken over.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], given: Sequence[Content]) -> None:
        self._parameters, self._given = parameters, given
        self._taken: dict[int, torch.Tensor] = {}

    def add(self, name: str, *terms: torch.Tensor) -> None:
        """Add the sum of the terms; a first gradient is taken as it is if nothing else has used its memory so far."""
        parameter, gradient = self._parameters[name], reduce(torch.add, terms)
        if parameter.grad is not None:
            add_to(parameter, gradient, take=False)
            return
        storage = storage_of(gradient)
        is_taken = storage in self._taken and self._holder(storage) is not None
        is_free = not is_taken and storage not in self._used
        if add_to(parameter, gradient, take=is_free):
            self._taken[storage] = parameter

    @cached_property
    def _used(self) -> frozenset[int]:
        return storages_of([content for content in self._given if isinstance(content, torch.Tensor)])

    def part_from(self, contents: Iterable[Content]) -> None:
        """Copy what was taken of memory that other results share."""
        for content in contents if self._taken else ():
            if isinstance(content, torch.Tensor) and (holder := self._holder(storage_of(content))) is not None:
                assert holder.grad is not None, "it holds it"
                holder.grad = holder.grad.clone()

    def _holder(self, storage: int) -> torch.Tensor | None:
        """Return the parameter whose gradient has this memory; one that was sent away since has it no more."""
        parameter = self._taken.get(storage)
        is_held = parameter is not None and parameter.grad is not None and storage_of(parameter.grad) == storage
        return parameter if is_held else None


def add_to(parameter: torch.Tensor, gradient: torch.Tensor, *, take: bool) -> bool:
    """Add a gradient to that of a parameter; return whether it was taken as it is, which only a first one may be.

    Args:
        parameter: whose gradient it is.
        gradient: what is added.
        take: whether its memory is nobody else's.
    """
    if gradient.layout != torch.strided:  # of a sparse embedding
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return False
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
        return False
    if take and _fills(gradient, parameter):
        parameter.grad = gradient
        return True
    parameter.grad = torch.empty_like(parameter).copy_(gradient)
    return False


def storage_of(tensor: torch.Tensor) -> int:
    """Return what names the memory of a tensor."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def storages_of(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    """Return what names the memory of tensors."""
    dense = torch.strided
    return frozenset([t.untyped_storage().data_ptr() if t.layout == dense else id(t) for t in tensors])


def _fills(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a gradient has the parameter's form and fills its storage (so it is no view of something)."""
    return (
        gradient.dtype == parameter.dtype
        and gradient.stride() == parameter.stride()
        and gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
    )
