"""Law of a loss, read from autograd's graph: whether losses of micro-batches make the batch's as a mean or a sum.

The graph is walked from the loss back to its first reductions, and on from these to what units return:

    loss ── sums of terms, fixed factors ── reductions over all elements ── operations of single rows ── units

A loss is proven if all reductions are means, or all are sums, if only known operations of rows lie behind them, and if
runs with different numbers of samples have the same factors and elements in proportion to the samples. A term without
samples (a penalty of weights) may be added to means. Anything else, or unknown, is not proven: a mean over valid
targets, a root of a mean, a product of samples with each other.

Samples lie along the first dimension here; who asks has to know that they do.

Every play of a step without a head is looked at: where one makes its loss otherwise than was proven, the batch is run
as a whole (`unlike_law`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_pipe.capture.torch_private import without_modes

Law = Literal["mean", "sum", "fixed", "unknown"]
Rows = Literal["rows", "fixed", "unknown"]

_SUM_REDUCTION, _MEAN_REDUCTION = 2, 1  # at::Reduction
_SCALES = ("MulBackward", "DivBackward")
_PASSED = (
    "AddBackward SubBackward NegBackward CloneBackward AliasBackward ViewBackward UnsafeViewBackward "
    "ReshapeAliasBackward SqueezeBackward UnsqueezeBackward ToCopyBackward StackBackward CatBackward"
).split()
_BY_ELEMENT = frozenset(
    f"{name}Backward"
    for name in (
        "Add Sub Mul Div Neg Pow Exp Expm1 Log Log1P Sqrt Rsqrt Abs Sin Cos Sigmoid LogSigmoid Tanh Relu Gelu Silu Elu "
        "Softplus LeakyRelu Clamp ClampMin ClampMax Where MaskedFill Maximum Minimum Xlogy Reciprocal ToCopy Clone "
        "Alias MseLoss HuberLoss SmoothL1Loss BinaryCrossEntropy BinaryCrossEntropyWithLogits NllLoss NllLoss2D"
    ).split()
)
_ALONG = frozenset(f"{name}Backward" for name in ("LogSoftmax", "Softmax", "Sum", "Mean", "Select", "Slice", "Squeeze"))
_RESHAPED = frozenset(("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward"))
_PARAMETER = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class Reductions:
    """The first reductions behind a loss, and the factors between.

    Attributes:
        kinds: of the reductions.
        factors: single numbers that their results are multiplied with, or divided by.
        law: how a loss of rows depends on them.
        scales: those of the factors that are no numbers of samples.
        elements: numbers of the elements that are reduced, that sums are divided by, and of what rows go through.
    """

    kinds: frozenset[Literal["mean", "sum", "unknown"]]
    factors: tuple[float, ...]
    law: Law = "unknown"
    scales: tuple[float, ...] = ()
    elements: tuple[int, ...] = ()


def reductions(loss: torch.Tensor, *, units: Set[Any] = frozenset(), samples: int = 1) -> Reductions:
    """Walk from a loss back to its first reductions, and to units.

    Args:
        loss: the loss.
        units: nodes of autograd's graph that made what units return.
        samples: their number.
    """
    with without_modes():
        return _reductions(loss, units, samples)


def _reductions(loss: torch.Tensor, units: Set[Any], samples: int) -> Reductions:
    kinds: set[Any] = set()
    factors: list[float] = []
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = _name(node)
        inputs = [function for function, _ in node.next_functions]
        if name in _SCALES:
            factors.extend(_factors(node))
        if name in _SCALES or name in _PASSED or _joins_terms(name, inputs):
            waiting.extend(inputs)
        else:
            kinds.add(_kind(node, name))
    reader = _LawReader(units, samples)
    law = reader.law(loss.grad_fn)
    return Reductions(frozenset(kinds), tuple(sorted(factors)), law, tuple(reader.scales), tuple(reader.elements))


class _LawReader:
    """Read the law of a loss.

    Args:
        units: nodes that made what units return.
        samples: their number.

    Attributes:
        elements, scales: as of `Reductions`, in the order of the walk.
    """

    def __init__(self, units: Set[Any], samples: int) -> None:
        self._units, self._samples = units, samples
        self.elements: list[int] = []
        self.scales: list[float] = []
        self._known: dict[Any, Rows] = {}

    def law(self, node: Any) -> Law:
        """Return how a single number depends on rows."""
        if node in self._units:
            return "unknown"
        if node is None or node.name() == _PARAMETER:
            return "fixed"
        name = _name(node)
        inputs = [function for function, _ in node.next_functions]
        if name in _SCALES:
            return self._scaled(node, name, [self.law(one) for one in inputs])
        if name in _PASSED or _joins_terms(name, inputs):
            terms = {self.law(one) for one in inputs if one is not None}
            rest = terms - {"fixed"}
            is_one_kind = len(rest) == 1 and (terms == rest or rest == {"mean"})
            return rest.pop() if is_one_kind else "unknown" if rest else "fixed"
        kind = _kind(node, name)
        if kind == "unknown" or not self._divides_by_all(node, name):
            return "unknown"
        rows = self._joined(inputs)
        if rows == "rows":
            self.elements.append(_elements(node))
        return kind if rows == "rows" else rows

    def _scaled(self, node: Any, name: str, laws: Sequence[Law]) -> Law:
        """Return the law of a product, or a quotient: a sum that is divided by the number of its rows is a mean."""
        moving = [one for one in laws if one != "fixed"]
        is_divisor = name == "DivBackward" and len(laws) > 1 and laws[1] != "fixed"
        if is_divisor or len(moving) > 1:
            return "unknown"
        factors = list(_factors(node))
        if name == "DivBackward" and moving == ["sum"] and len(factors) == 1 and factors[0].is_integer():
            self.elements.append(int(factors[0]))
            return "mean"
        self.scales += factors
        return moving[0] if moving else "fixed"

    def _divides_by_all(self, node: Any, name: str) -> bool:
        """Return whether a cross entropy that is a mean is one over all targets, each with the same weight."""
        if not name.startswith("NllLoss") or node._saved_reduction != _MEAN_REDUCTION:
            return True
        return node._saved_weight is None and float(node._saved_total_weight) == node._saved_target.numel()

    def _joined(self, nodes: Sequence[Any]) -> Rows:
        found = {self._rows(node) for node in nodes}
        return "unknown" if "unknown" in found else "rows" if "rows" in found else "fixed"

    def _rows(self, node: Any) -> Rows:
        """Return whether a tensor has rows that are each made of one sample."""
        if node in self._units:
            return "rows"
        if node is None or node.name() == _PARAMETER:
            return "fixed"
        if node not in self._known:
            name = _name(node)
            inputs = [function for function, _ in node.next_functions]
            self._known[node] = self._joined(inputs) if self._keeps_rows(node, name) else "unknown"
        return self._known[node]

    def _keeps_rows(self, node: Any, name: str) -> bool:
        if name in _BY_ELEMENT:
            others = (getattr(node, saved, None) for saved in ("_saved_other", "_saved_self", "_saved_weight"))
            weights = (one for one in others if isinstance(one, torch.Tensor) and not one.requires_grad)
            reduces = getattr(node, "_saved_reduction", 0) != 0
            return not reduces and all(one.numel() == 1 for one in weights)
        if name == "UnsqueezeBackward":
            return _signed(node._saved_dim) > 0 or _signed(node._saved_dim) == -1
        if name == "TransposeBackward":
            return _signed(node._saved_dim0) > 0 and _signed(node._saved_dim1) > 0
        if name not in _ALONG | _RESHAPED or (shape := _shape(node)) is None:
            return False
        self.elements.append(math.prod(shape))
        is_along_samples = name in _ALONG and 0 in _dims(node, len(shape))
        return bool(shape) and shape[0] % self._samples == 0 and not is_along_samples


def _name(node: Any) -> str:
    return str(node.name().rstrip("0123456789"))


def _signed(dim: int) -> int:
    return dim - 2**64 if dim >= 2**63 else dim


def _dims(node: Any, ndim: int) -> frozenset[int]:
    """Return the dimensions along which an operation works; all where it does not say."""
    dims = getattr(node, "_saved_dim", ()) or range(ndim)
    return frozenset(_signed(dim) % ndim for dim in ([dims] if isinstance(dims, int) else dims))


def _shape(node: Any) -> tuple[int, ...] | None:
    """Return the shape of what an operation was given, None if that is not known."""
    result = getattr(node, "_saved_result", None)
    sizes = result.shape if isinstance(result, torch.Tensor) else getattr(node, "_saved_self_sym_sizes", None)
    return None if sizes is None else tuple(map(int, sizes))


def _elements(node: Any) -> int:
    given = getattr(node, "_saved_target", None)
    given = getattr(node, "_saved_self", None) if given is None else given
    return given.numel() if isinstance(given, torch.Tensor) else math.prod(_shape(node) or ())


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
    is_sum = all(run.kinds == {"sum"} and _alike(run.factors, first.factors) for run in runs)
    return "sum" if is_sum else "mean"


def is_proven(runs: Sequence[tuple[int, Reductions]]) -> bool:
    """Return whether the losses of parts make that of all as `combine_of` says.

    Args:
        runs: number of samples of each, and what was read.
    """
    (samples, first), *others = runs
    if not any(count != samples for count, _ in others):
        return False
    if first.law not in ("mean", "sum") or combine_of([run for _, run in runs]) != first.law:
        return False
    by_sample = [[count * samples for count in run.elements] for _, run in runs]
    expected = [[one * count for one in first.elements] for count, _ in runs]
    return by_sample == expected and all(run.law == first.law and _alike(run.scales, first.scales) for _, run in runs)


def _alike(ones: Sequence[float], others: Sequence[float]) -> bool:
    return len(ones) == len(others) and all(map(math.isclose, ones, others))


def unlike_law(traced: tuple[int, Reductions], plays: Sequence[tuple[int, Reductions]]) -> str:
    """Return "" if plays make their losses as was proven of the traced run, else what they do.

    Args:
        traced: samples of the traced run, and what was read of its loss.
        plays: the same of every play of a batch.
    """
    samples, first = traced
    for count, play in plays:
        by_sample = [elements * samples for elements in play.elements]
        is_same = play.law == first.law and by_sample == [elements * count for elements in first.elements]
        if not is_same or not _alike(play.scales, plays[0][1].scales):
            return (
                "its loss is made otherwise than when it was traced, and micro-batches may not make that of the batch"
            )
    return ""
