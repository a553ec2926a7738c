"""Differences between two runs of a step: of its loss, and of the gradient, buffer or report that differs most.

Gradients are looked at in pieces of some thousand numbers, in double precision, so that comparing two sets of gradients
takes no memory besides them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from lightning_pipe.capture.eager_reference import EagerReference
from lightning_pipe.capture.route import Route
from lightning_pipe.strategy.checks.captured_run import CapturedRun
from lightning_pipe.strategy.checks.reported_numbers import reported_numbers

_PIECE = 2**18  # numbers that are compared at once
_COARSE = 1e-3  # eps of types in which rounding decides too often which of several scores is the largest


@dataclass(frozen=True)
class Difference:
    """Where captured and plain differ most, relative to scale.

    Attributes:
        name: of a parameter or buffer, or what is logged or returned; "" for the loss.
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
    plain: EagerReference, loss: torch.Tensor | None, gradients: Mapping[str, torch.Tensor]
) -> tuple[Difference, Difference]:
    """Return the difference of the loss, and the largest of a gradient; what one run has not counts as zeros."""
    largest = {name: _largest(gradient) for name, gradient in plain.gradients.items()}
    least = _least(plain) * max(largest.values(), default=0.0)
    every = (
        _difference(name, gradients.get(name), plain.gradients.get(name), plain, least=least)
        for name in {**plain.gradients, **gradients}
    )
    worst = max(every, key=_relative, default=_none(plain))
    if plain.loss is None or loss is None:
        return _none(plain), worst
    found, expected = (one.detach().cpu().reshape(1) for one in (loss, plain.loss))
    return _difference("", found, expected, plain, least=_least(plain)), worst


def compared_reports(captured: Route, plain: EagerReference, run: CapturedRun, *, samples: int) -> Difference:
    """Return the largest difference of a buffer that the step writes, or of a number that it logs or returns.

    None is looked for where rounding decides too often which of several scores is the largest, nor in a replayed step,
    whose reports are known when it has run.

    Args:
        captured: the step.
        plain: the run of the plain step.
        run: the run of the captured step on the same samples.
        samples: their number.
    """
    if captured.plays is not None or torch.finfo(plain.coarsest).eps > _COARSE:
        return _none(plain)
    record, recording, batch = captured.record, plain.recording, run.batch
    compared_buffers = plain.buffers.keys() - {*captured.buffers_by_parts()}
    pairs = [(f"the buffer {name}", run.buffers[name], plain.buffers[name]) for name in compared_buffers]
    reported = reported_numbers(record.calls, record.returned, batch.get, samples)
    expected = reported_numbers(recording.calls, recording.returned, lambda name: recording.results[int(name)], samples)
    pairs += [(place, reported[place], expected[place]) for place in reported.keys() & expected.keys()]
    every = (_difference(name, one.cpu(), two.cpu(), plain, least=_least(plain)) for name, one, two in pairs)
    return max(every, key=_relative, default=_none(plain))


def _difference(
    name: str, one: torch.Tensor | None, two: torch.Tensor | None, plain: EagerReference, *, least: float
) -> Difference:
    """Return the difference of a captured and a plain tensor; infinite where their shapes differ."""
    if one is not None and two is not None and one.shape != two.shape:
        return Difference(
            f"{name} ({tuple(one.shape)} for {tuple(two.shape)})", *(torch.nan,) * 2, torch.inf, plain.coarsest
        )
    absolute, *numbers = _furthest(one, two)
    scale = max(0.0 if two is None else _largest(two), least)
    relative = 0.0 if absolute == 0.0 else absolute / scale if scale and absolute < torch.inf else torch.inf
    return Difference(name, numbers[0], numbers[1], relative, plain.coarsest)


def _none(plain: EagerReference) -> Difference:
    return Difference("", 0.0, 0.0, 0.0, plain.coarsest)


def _least(plain: EagerReference) -> float:
    return float(torch.finfo(plain.coarsest).eps ** 0.25)


def _relative(difference: Difference) -> float:
    return difference.relative


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
