"""Rules of operators that pick elements by places, or put them there.

Places in a dimension of samples are those of the batch. Where rows are picked by their own places (`o[arange(n), y]`),
they become places in the micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from lightning_pipe.capture.slicing.operation import BatchOperation, Label, Labels, Offered, Pattern, SampleCut
from lightning_pipe.capture.slicing.placement import TERMS, WHOLE, Placements, Rows
from lightning_pipe.capture.slicing.rules import aligned, labels_of, pattern, rule
from lightning_pipe.capture.torch_private import operator_name


def _fitting(operation: BatchOperation, node: fx.Node, labels: Labels) -> list[Label]:
    """Take away labels of dimensions whose size is not that of the result's."""
    pairs = zip(labels, operation.shape_of(node), operation.shape, strict=False)
    return [label if size == expected else None for label, size, expected in pairs]


@pattern("gather")
def gathers(operation: BatchOperation) -> Pattern:
    """Pick along a dimension: of each row, or rows of what has none by places that have some."""
    source, dim, places = operation.args[:3]
    labels = labels_of(len(operation.shape))
    dim = dim % len(labels) if labels else 0
    picked = [label for at, label in enumerate(_fitting(operation, source, labels)) if at != dim]
    return Pattern([(places, labels), (source, [*picked[:dim], None, *picked[dim:]])], [labels])


@pattern("scatter", "scatter_add", "scatter_reduce")
def scatters(operation: BatchOperation) -> Pattern:
    """Put along a dimension; what is added into it along a dimension of samples is a sum of terms."""
    source, dim, *moved = operation.args[:4]
    rank = len(operation.shape)
    adds = operation.name == "scatter_add"
    labels = labels_of(rank, without=[dim % rank])
    moved = [node for node in moved if isinstance(node, fx.Node)]
    moving = labels_of(rank) if adds else labels
    operands = [(node, moving if adds else _fitting(operation, node, moving)) for node in moved]
    return Pattern([*operands, (source, labels)], [labels], sums=adds, added=[source] if adds else ())


@pattern("index_add")
def index_adds(operation: BatchOperation) -> Pattern:
    """Add rows to places; rows of samples are terms."""
    source, dim, places, moved = operation.args[:4]
    rank = len(operation.shape)
    labels = labels_of(rank, without=[dim % rank])
    moving: list[Label] = ["i" if at == dim % rank else label for at, label in enumerate(labels)]
    return Pattern([(moved, moving), (places, "i"), (source, labels)], [labels], sums=True, added=[source])


@pattern("index_select")
def index_selects(operation: BatchOperation) -> Pattern:
    """Pick along a dimension by places that all rows share, or that have rows."""
    source, dim, places = operation.args[:3]
    rank = len(operation.shape)
    labels = labels_of(rank, without=[dim % rank])
    result: list[Label] = ["i" if at == dim % rank else label for at, label in enumerate(labels)]
    return Pattern([(source, labels), (places, "i")], [result])


@pattern("embedding")
def embeds(operation: BatchOperation) -> Pattern:
    """Pick rows of a table."""
    labels = labels_of(len(operation.shape) - 1)
    return Pattern([(operation.args[1], labels)], [[*labels, None]])


@pattern("embedding_dense_backward")
def embedding_backward(operation: BatchOperation) -> Pattern | None:
    """Add rows to a table, unless they are scaled by how often the batch has each."""
    gradient, places = operation.args[:2]
    if operation.argument("scale_grad_by_freq", False):
        return None
    labels = labels_of(len(operation.shape_of(places)))
    return Pattern([(gradient, [*labels, None]), (places, labels)], [[None, None]], sums=True)


@pattern("_sparse_coo_tensor_with_dims_and_tensors")
def sparse_rows(operation: BatchOperation) -> Pattern:
    """Make a sparse tensor of rows and their places, which add up: a gradient of a table."""
    places, rows = operation.argument("indices"), operation.argument("values")
    labels: list[Label] = ["n", *[None] * (len(operation.shape_of(rows)) - 1)]
    return Pattern([(places, [None, "n"]), (rows, labels)], [TERMS])


class _Indexed(NamedTuple):
    """How an operand is indexed: rows of what is picked, how it has to be held, and how its indices have to be."""

    picked: Rows
    source: Placements
    indices: dict[fx.Node, Placements]
    places: frozenset[fx.Node] = frozenset()


def _counts_samples(operation: BatchOperation, node: fx.Node) -> bool:
    """Return whether a value numbers the samples: `arange(n)`, whatever its shape and type."""
    while operator_name(node) in ("unsqueeze", "view", "clone", "_to_copy", "lift_fresh_copy"):
        node = node.all_input_nodes[0]
    if operator_name(node) != "arange":
        return False
    arange = BatchOperation(node, operation.samples, operation.number)
    return arange.args in ([operation.samples], [0, operation.samples]) and arange.shape == (operation.samples,)


def _indexed(operation: BatchOperation, offered: Offered) -> _Indexed | None:
    """Return how rows of what is indexed, or of its indices, are picked."""
    source, listed = operation.args[:2]
    indexed_by = {dim: index for dim, index in enumerate(listed) if index is not None}
    if any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in indexed_by.values()):
        return None
    dims, rank = [*indexed_by], max(len(operation.shape_of(index)) for index in indexed_by.values())
    at = dims[0] if dims == [*range(dims[0], dims[-1] + 1)] else 0  # where the dimensions of the indices go
    rows = offered[source]
    if isinstance(rows, Rows) and rows.dim not in dims:
        dims_before = sum(dim < rows.dim for dim in dims)
        place = rows.dim - dims_before  # its place among the dimensions that are not indexed
        picked = replace(rows, dim=place if place < at else place + rank)
        indices: dict[fx.Node, Placements] = dict.fromkeys(indexed_by.values(), WHOLE)
        return _Indexed(picked, rows, indices)
    arange = next(((dim, index) for dim, index in indexed_by.items() if _counts_samples(operation, index)), None)
    shape = operation.shape_of(source)
    if arange is not None and shape[arange[0]] == operation.samples and rows in (WHOLE, Rows(arange[0])):
        lead = rank - len(operation.shape_of(arange[1]))
        inside = operation.shape_of(arange[1]).index(operation.samples) + lead
        fit = _index_rows(operation, offered, indexed_by, rank, Rows(inside))
        return None if fit is None else _Indexed(Rows(inside + at), Rows(arange[0]), fit, frozenset([arange[1]]))
    if isinstance(rows, Rows):
        return None
    for index in indexed_by.values():
        if isinstance(index_rows := offered[index], Rows):
            inside_rows = replace(index_rows, dim=index_rows.dim + rank - len(operation.shape_of(index)))
            fit = _index_rows(operation, offered, indexed_by, rank, inside_rows)
            return None if fit is None else _Indexed(replace(inside_rows, dim=inside_rows.dim + at), WHOLE, fit)
    return None


def _index_rows(
    operation: BatchOperation, offered: Offered, indexed_by: dict[int, fx.Node], rank: int, rows: Rows
) -> dict[fx.Node, Placements] | None:
    """Return how indices have to be held that are broadcast to so many dimensions with these rows."""
    required: dict[fx.Node, Placements] = {}
    for index in indexed_by.values():
        shape = operation.shape_of(index)
        dim = rows.dim - (rank - len(shape))
        has_rows = dim >= 0 and shape[dim] == rows.size(operation.samples)
        placement = replace(rows, dim=dim) if has_rows else WHOLE
        if isinstance(offered[index], Rows) and offered[index] != placement:
            return None
        required[index] = placement
    return required


@rule("index", "_unsafe_index")
def indexes(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Pick by tensors of places."""
    indexed = _indexed(operation, offered)
    if indexed is None:
        return None
    operands = {**indexed.indices, operation.args[0]: indexed.source}
    return SampleCut(indexed.picked, operands, places=indexed.places)


@rule("index_put", "_unsafe_index_put")
def index_puts(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Put at tensors of places, or where a mask is true."""
    source, listed, moved = operation.args[:3]
    index_tensors = [index for index in listed if index is not None]
    rank = len(operation.shape)
    if any(index.meta["val"].dtype is torch.bool for index in index_tensors):
        if len(listed) > 1 or operation.shape_of(index_tensors[0]) != operation.shape or operation.shape_of(moved):
            return None
        return Pattern(aligned(operation, [source, *index_tensors], rank), [labels_of(rank)]).cut(operation, offered)
    if not any(isinstance(offered[node], Rows) for node in (source, *index_tensors)):
        return _put_rows(operation, offered)
    indexed = _indexed(operation, offered)
    if indexed is None:
        return None
    values = rank - len(index_tensors) + max(len(operation.shape_of(index)) for index in index_tensors)
    shape = operation.shape_of(moved)
    dim = indexed.picked.dim - (values - len(shape))
    has_rows = dim >= 0 and shape[dim] == indexed.picked.size(operation.samples)
    required = replace(indexed.picked, dim=dim) if has_rows else WHOLE
    if isinstance(offered[moved], Rows) and offered[moved] != required:
        return None
    operands: dict[fx.Node, Placements] = {**indexed.indices, moved: required}
    if isinstance(indexed.source, Rows):
        return SampleCut(indexed.source, {**operands, source: indexed.source}, places=indexed.places)
    accumulates = len(operation.args) > 3 and operation.args[3]
    return SampleCut(TERMS, {**operands, source: TERMS}, places=indexed.places) if accumulates else None


def _put_rows(operation: BatchOperation, offered: Offered) -> SampleCut | None:
    """Put values with rows in dimensions that are not indexed."""
    source, listed, moved = operation.args[:3]
    rows = offered[moved]
    assert isinstance(rows, Rows)
    indexed_by = {dim: index for dim, index in enumerate(listed) if index is not None}
    dims, rank = [*indexed_by], max(len(operation.shape_of(index)) for index in indexed_by.values())
    at = dims[0] if dims == [*range(dims[0], dims[-1] + 1)] else 0
    free = [dim for dim in range(len(operation.shape)) if dim not in indexed_by]
    dim = rows.dim + len(free) + rank - len(operation.shape_of(moved))
    if at <= dim < at + rank:
        return None
    placed = replace(rows, dim=free[dim if dim < at else dim - rank])
    if operation.shape[placed.dim] != rows.size(operation.samples):
        return None
    return SampleCut(placed, {**dict.fromkeys(indexed_by.values(), WHOLE), source: placed, moved: rows})
