"""Loss weighting of micro-batches (mean or sum), read from the last operations of the loss.

The graph of autograd is walked from the loss back through sums of terms and factors to the first reductions. The loss
is a sum if all of them are sums, and if what they are multiplied with does not depend on the samples (a sum that is
divided by their number is a mean). Anything else, or unknown, counts as a mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

_SUM_REDUCTION, _MEAN_REDUCTION = 2, 1  # at::Reduction
_SCALES = ("MulBackward", "DivBackward")
_PASSED = (
    "AddBackward SubBackward NegBackward CloneBackward AliasBackward ViewBackward UnsafeViewBackward "
    "ReshapeAliasBackward SqueezeBackward UnsqueezeBackward ToCopyBackward StackBackward CatBackward"
).split()


@dataclass(frozen=True)
class Reductions:
    """The first reductions behind a loss, and the factors between.

    Attributes:
        kinds: of the reductions.
        factors: single numbers that their results are multiplied with, or divided by.
    """

    kinds: frozenset[Literal["mean", "sum", "unknown"]]
    factors: tuple[float, ...]


def reductions(loss: torch.Tensor) -> Reductions:
    """Walk from a loss back to its first reductions."""
    kinds: set[Any] = set()
    factors: list[float] = []
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = node.name().rstrip("0123456789")
        inputs = [function for function, _ in node.next_functions]
        if name in _SCALES:
            factors.extend(_factors(node))
        if name in _SCALES or name in _PASSED or _joins_terms(name, inputs):
            waiting.extend(inputs)
        else:
            kinds.add(_kind(node, name))
    return Reductions(frozenset(kinds), tuple(sorted(factors)))


def _factors(node: Any) -> Iterator[float]:
    for tensor in (getattr(node, name, None) for name in ("_saved_other", "_saved_self")):
        if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and not tensor.requires_grad:
            yield float(tensor)


def _joins_terms(name: str, inputs: Sequence[Any]) -> bool:
    """Return whether a reduction only adds terms that were stacked before."""
    stacked = ("StackBackward0", "CatBackward0")
    return name == "SumBackward" and any(i is not None and i.name() in stacked for i in inputs)


def _kind(node: Any, name: str) -> Literal["mean", "sum", "unknown"]:
    reduction = getattr(node, "_saved_reduction", None)
    if name == "MeanBackward" or reduction == _MEAN_REDUCTION:
        return "mean"
    return "sum" if name == "SumBackward" or reduction == _SUM_REDUCTION else "unknown"


def combine_of(runs: Sequence[Reductions]) -> Literal["mean", "sum"]:
    """Return how losses are combined, from runs with different numbers of samples; as a mean where there are none."""
    if not runs:
        return "mean"
    first = runs[0]
    if any(run.kinds != {"sum"} or len(run.factors) != len(first.factors) for run in runs):
        return "mean"
    same = all(math.isclose(a, b) for run in runs for a, b in zip(run.factors, first.factors, strict=True))
    return "sum" if same else "mean"
