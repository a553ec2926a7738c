"""Rules of losses that reduce inside, and of sums of terms."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import fx

from lightning_pipe.capture.operators import differentiates
from lightning_pipe.capture.slicing.operation import BatchOperation, Label, Labels, Offered, Pattern, SampleCut
from lightning_pipe.capture.slicing.placement import LOCAL, TERMS, WHOLE, Kind, Placements, Rows
from lightning_pipe.capture.slicing.rules import aligned, labels_of, pattern, rule

_MEAN, _SUM = 1, 2  # values of `reduction`; 0 for none


@pattern("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward")
def likelihoods(operation: BatchOperation) -> Pattern | None:
    """Sum over samples; a mean is made a sum by the weight of the batch before (`whole_batch`)."""
    is_back = operation.name.endswith("backward")
    source, target, reduction = (operation.argument(name) for name in ("self", "target", "reduction"))
    if len(operation.shape_of(source)) < 2 or (reduction == _MEAN and not is_back):
        return None
    each: list[Label] = ["n", *[None] * (len(operation.shape_of(target)) - 1)]
    operands: list[tuple[fx.Node, Labels]] = [(source, ["n", *[None] * len(each)]), (target, each)]
    if is_back:
        operands += [(operation.argument("grad_output"), each)] if reduction == 0 else []
        local = [operation.argument("total_weight")] if reduction == 0 else []  # which nobody reads then
        return Pattern(operands, [["n", *[None] * len(each)]], local=local)
    results: list[Labels | Kind] = [each, LOCAL] if reduction == 0 else [[], []]
    return Pattern(operands, results, sums=reduction != 0)


_KERNELS = (
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy l1_loss soft_margin_loss binary_cross_entropy_with_logits "
    "kl_div"
).split()


@rule(*_KERNELS, *(f"{name}_backward" for name in _KERNELS))
def reduced_losses(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Reduce element by element; a mean is a sum divided by the elements of the batch."""
    is_back, reduction = operation.name.endswith("backward"), operation.argument("reduction")
    incoming = operation.argument("grad_output") if is_back and reduction else None
    sources = [node for node in operation.inputs if node is not incoming]
    rank = max(len(operation.shape_of(node)) for node in sources)
    result = [] if reduction and not is_back else labels_of(rank)
    cut = Pattern(aligned(operation, sources, rank), [result], sums=not is_back).cut(operation, offered)
    if cut is None or reduction != _MEAN:
        return cut
    count = math.prod(operation.shape_of(operation.argument("self")))
    return replace(cut, arguments=lambda samples: {"reduction": _SUM}, divisor=count)


_ADDS = {"add", "sub", "rsub", "cat", "stack", "where"}
_TIMES = {"mul", "mm", "bmm", "mv", "dot"}
_MOVES = set(
    "neg clone alias _to_copy view _unsafe_view reshape expand unsqueeze squeeze permute transpose t select slice sum "
    "mean tril triu diagonal select_backward slice_backward split split_with_sizes unbind flip".split()
)


_WRITES = {"index_put", "_unsafe_index_put", "index_add", "scatter", "scatter_add", "slice_scatter", "select_scatter"}
_WRITTEN = ("values", "source", "src")


def cut_terms(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Return how an operator that is linear in terms is run on each; None if it is not.

    What is added to terms, and has none, becomes a term of the first micro-batch.
    """
    name, terms = operation.name, [node for node in operation.inputs if offered[node] is TERMS]
    operands: dict[fx.Node, Placements]
    if any(offered[node] not in (TERMS, WHOLE) for node in operation.inputs):
        return None
    if name in _ADDS:
        condition = operation.args[0] if name == "where" else None
        numbers = [arg for arg in operation.args if isinstance(arg, int | float)]
        if condition in terms or (numbers and condition is not None):
            return None
        after_first = {"other": 0} if numbers and name in ("add", "sub", "rsub") else {}
        added: dict[fx.Node, Placements] = {n: WHOLE if n is condition else TERMS for n in operation.inputs}
        is_shared = bool(numbers) or any(offered[node] is not TERMS for node in added if node is not condition)
        if is_shared and not operation.node.meta["val"].dtype.is_floating_point:
            return None  # of a whole number there are no shares
        return SampleCut(TERMS, added, after_first=after_first)
    if name in _WRITES:
        written = {operation.args[0], *(operation.argument(name) for name in _WRITTEN if operation.has(name))}
        operands = {node: TERMS if node in written else WHOLE for node in operation.inputs}
        return SampleCut(TERMS, operands) if written.issuperset(terms) else None
    uses = sum(node is terms[0] for node in _listed(operation.args))
    is_factor = name in _TIMES and len(terms) == 1 and uses == 1
    is_divided = name == "div" and terms == [operation.args[0]] and uses == 1 and not operation.kwargs
    grows = name == "expand" and math.prod(operation.shape) > math.prod(operation.shape_of(terms[0]))
    grows = grows and any(isinstance(size, torch.SymInt) for size in operation.node.meta["val"].shape)  # by samples
    is_derivative = differentiates(operation.node) and terms == [operation.args[0]] and uses == 1  # linear in it
    if is_factor or is_divided or is_derivative or (name in _MOVES and not grows and not _rounds(operation)):
        operands = {node: _plain(offered[node]) for node in operation.inputs}
        several = tuple(WHOLE if shape is None else TERMS for shape in operation.shapes)
        return SampleCut(several if operation.has_several else TERMS, operands)
    return None


def _plain(placement: Placements) -> Placements:
    assert not isinstance(placement, Rows), "rows were refused"
    return placement


def _rounds(operation: BatchOperation) -> bool:
    """Return whether a cast loses what terms have behind the point."""
    value = operation.node.meta["val"]
    is_cast = operation.name == "_to_copy" and isinstance(value, torch.Tensor)
    return is_cast and not (value.is_floating_point() or value.is_complex())


def _listed(args: list[object]) -> list[object]:
    return [item for arg in args for item in (_listed([*arg]) if isinstance(arg, list | tuple) else [arg])]
