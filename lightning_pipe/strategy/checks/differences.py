"""Differences between the results of two runs of a step: of the loss, and of the gradient that differs most.

Gradients are looked at in pieces of some thousand numbers, in double precision, so that comparing two sets of gradients
takes no memory besides them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from lightning_pipe.capture.eager_reference import EagerReference

_PIECE = 2**18  # numbers that are compared at once


@dataclass(frozen=True)
class Difference:
    """Where captured and plain differ most, relative to scale.

    Attributes:
        name: of a parameter; "" for the loss.
        captured, plain: the two numbers.
        relative: their difference in units of the scale.
        dtype: the least exact type of the computation.
    """

    name: str
    captured: float
    plain: float
    relative: float
    dtype: torch.dtype

    @property
    def allowed(self) -> float:
        """Return how large it may be."""
        return float(torch.finfo(self.dtype).eps ** 0.5)


def compared(
    plain: EagerReference, loss: torch.Tensor, gradients: Mapping[str, torch.Tensor]
) -> tuple[Difference, Difference]:
    """Return the difference of the loss, and the largest of a gradient; what one run has not counts as zeros."""
    least = torch.finfo(plain.coarsest).eps ** 0.25
    largest = {name: _largest(gradient) for name, gradient in plain.gradients.items()}
    least_gradient = least * max(largest.values(), default=0.0)

    def difference(name: str, pair: tuple[torch.Tensor | None, torch.Tensor | None], scale: float) -> Difference:
        absolute, *numbers = _furthest(*pair)
        relative = 0.0 if absolute == 0.0 else absolute / scale if scale and absolute < torch.inf else torch.inf
        return Difference(name, numbers[0], numbers[1], relative, plain.coarsest)

    every = (
        difference(name, (gradients.get(name), plain.gradients.get(name)), max(largest.get(name, 0.0), least_gradient))
        for name in {**plain.gradients, **gradients}
    )
    none = Difference("", 0.0, 0.0, 0.0, plain.coarsest)
    worst = max(every, key=lambda one: one.relative, default=none)
    losses = (loss.cpu().reshape(1), plain.loss.cpu().reshape(1))
    return difference("", losses, max(_largest(losses[1]), least)), worst


def _furthest(found: torch.Tensor | None, expected: torch.Tensor | None) -> tuple[float, float, float]:
    """Return the largest absolute difference, infinite where one is not a number, and the two numbers there."""
    furthest: tuple[float, float, float] | None = None
    for one, two in _pieces(found, expected):
        apart = (one - two).abs_()
        if not math.isfinite(apart.max()):
            apart = torch.where((one == two) | (one.isnan() & two.isnan()), 0.0, apart)
            apart = apart.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        at = int(apart.argmax())
        if furthest is None or float(apart[at]) > furthest[0]:
            furthest = (float(apart[at]), float(one[at]), float(two[at]))
    return furthest or (0.0, 0.0, 0.0)


def _pieces(found: torch.Tensor | None, expected: torch.Tensor | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the numbers of both in double precision, piece by piece; zeros for what there is not."""
    one, two = (None if tensor is None else _numbers(tensor) for tensor in (found, expected))
    present = one if one is not None else two
    assert present is not None, "one of both has a gradient"
    absent = present.new_zeros(min(present.numel(), _PIECE)) if one is None or two is None else present
    for first in range(0, present.numel(), _PIECE):
        size = min(_PIECE, present.numel() - first)
        parts = (absent[:size] if numbers is None else numbers[first : first + size] for numbers in (one, two))
        left, right = (part.double() for part in parts)
        yield left, right


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor in a row."""
    strided = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return (torch.view_as_real(strided.resolve_conj()) if strided.is_complex() else strided).reshape(-1)


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value; 0 where there is none that is finite."""
    numbers, largest = _numbers(tensor), 0.0
    for piece in numbers.split(_PIECE) if numbers.numel() else ():
        sizes = piece.double().abs()
        most = float(sizes.max())
        largest = max(largest, most if math.isfinite(most) else float(sizes.nan_to_num_(nan=0.0, posinf=0.0).max()))
    return largest
