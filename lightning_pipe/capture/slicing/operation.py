"""An operator of a graph with its arguments at a number of samples, and a way of cutting it along these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.graphs.value_sizes import is_size
from lightning_pipe.capture.slicing.placement import LOCAL, TERMS, WHOLE, Kind, Placement, Placements, Rows
from lightning_pipe.capture.torch_private import argument_defaults, argument_names, operator_name

Label = str | int | None  # of a dimension; None where its elements meet
Labels = Sequence[Label]
Offered = Mapping[fx.Node, Placements]
Shape = tuple[int, ...]
Arguments = Callable[[int], Mapping[str, Any]]  # by name, for so many samples of a micro-batch


class BatchOperation:
    """A node of a graph that was traced for all samples.

    Args:
        node: a call of an operator.
        samples: number of samples of the batch.
        number: evaluates a size at this number of samples.

    Attributes:
        node, samples, number: as given.
        name: of the operator.
        args, kwargs: its arguments, with nodes for tensors and plain numbers for sizes.
        inputs: the tensors among them, each once.
        shapes: of its results; None for a result that is no tensor.
    """

    def __init__(self, node: fx.Node, samples: int, number: Callable[[Any], Any]) -> None:
        def plain(source: fx.Node) -> Any:
            return number(source.meta["val"]) if is_size(source) else source

        self.node, self.samples, self.number = node, samples, number
        self.name = operator_name(node)
        self.args: list[Any] = [*fx.map_arg(node.args, plain)]
        self.kwargs: dict[str, Any] = dict(fx.map_arg(node.kwargs, plain))
        positional = zip(argument_names(node), self.args, strict=False)
        self._named = {**argument_defaults(node), **dict(positional), **self.kwargs}
        self.inputs = tuple(dict.fromkeys(_nodes([self.args, [*self.kwargs.values()]])))
        value = node.meta.get("val")
        self.shapes = tuple(map(self._shape, value if isinstance(value, tuple | list) else [value]))
        self.has_several = isinstance(value, tuple | list)

    def _shape(self, value: Any) -> Shape | None:
        return tuple(map(self.number, value.shape)) if isinstance(value, torch.Tensor) else None

    @property
    def shape(self) -> Shape:
        """Return the shape of the first result."""
        assert self.shapes[0] is not None
        return self.shapes[0]

    def shape_of(self, source: fx.Node) -> Shape:
        """Return the shape of a tensor that the operator takes."""
        shape = self._shape(source.meta["val"])
        assert shape is not None, "an operand is a tensor"
        return shape

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in the schema; where it has none, the default."""
        return self._named.get(name, default)

    @property
    def trains(self) -> bool:
        """Return whether an operator that may take batch statistics takes them."""
        return bool(self.argument("training", self.argument("train", True)))

    def dims(self, name: str = "dim", *, rank: int | None = None) -> tuple[int, ...]:
        """Return the dimensions that an argument lists, counted from the front; all where it lists none."""
        rank = max(len(self.shape_of(self.args[0])) if rank is None else rank, 1)
        listed = self.argument(name)
        if listed is None or listed == []:
            return tuple(range(rank))
        return tuple(dim % rank for dim in (listed if isinstance(listed, list | tuple) else [listed]))

    def call(self, cut: SampleCut, *, samples: int, is_first: bool) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """Return what a micro-batch with so many samples calls; the divisor and shifted places are not in it."""
        changed = {**(cut.arguments(samples) if cut.arguments else {}), **({} if is_first else cut.after_first)}
        if cut.summed:
            dims, keeps = self.argument("dim"), self.argument("keepdim", False)
            return torch.ops.aten.sum.dim_IntList, (self.args[0], dims or [], keeps), {}
        args, kwargs = [*self.args], {**self.kwargs}
        for place, name in enumerate(argument_names(self.node)):
            if name in changed and place < len(args):
                args[place] = changed.pop(name)
        return self.node.target, tuple(args), {**kwargs, **changed}

    def has(self, name: str) -> bool:
        """Return whether the operator has an argument of this name."""
        return name in argument_names(self.node)


def _nodes(value: Any) -> list[fx.Node]:
    if isinstance(value, fx.Node):
        return [value]
    return [node for item in value for node in _nodes(item)] if isinstance(value, list | tuple) else []


@dataclass(frozen=True)
class SampleCut:
    """A way of running an operator on micro-batches.

    Attributes:
        results: how its results are held.
        operands: how it wants its operands to be held.
        arguments: other values of arguments, by name, for so many samples.
        divisor: by what its result is divided; None for nothing.
        places: operands that hold places of samples in the batch, which become those in the micro-batch.
        summed: whether a mean is taken as a sum.
        after_first: arguments, by name, for all micro-batches but the first.
    """

    results: Placements
    operands: Mapping[fx.Node, Placements]
    arguments: Arguments | None = None
    divisor: int | None = None
    places: frozenset[fx.Node] = frozenset()
    summed: bool = False
    after_first: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Pattern:
    """Which dimensions of operands and results go along with each other, by equal labels, as in an einsum.

    Attributes:
        operands: labels of the dimensions of operands; an operand that is not listed has no rows.
        results: labels of the dimensions of each result, or how it is held whatever the operands are.
        sums: whether rows with a label that a result has not are summed in it; else they cannot be cut.
        added: operands that are added to the result: terms where that is one.
        local: operands that every micro-batch has made for itself.
        arguments: as in `SampleCut`, given the rows of the first result that has some, else those of an operand.
    """

    operands: Sequence[tuple[fx.Node, Labels]]
    results: Sequence[Labels | Kind]
    sums: bool = False
    added: Sequence[fx.Node] = ()
    local: Sequence[fx.Node] = ()
    arguments: Callable[[Rows], Arguments] | None = None

    def cut(self, operation: BatchOperation, offered: Offered) -> SampleCut | None:
        """Return how the operator is cut where its operands are held as offered; None if it cannot be."""
        first = self._first_rows(offered)
        if first is None:
            return None
        rows, label = first
        operands: dict[fx.Node, Placements] = {}
        for node, labels in self.operands:
            placement = _placed(rows, label, labels, operation.shape_of(node), operation.samples)
            if placement is None or operands.setdefault(node, placement) != placement:
                return None
        placements: list[Placement] = []
        for result_labels, shape in zip(self.results, operation.shapes, strict=True):
            result = self._result(rows, label, result_labels, shape, operation.samples)
            if result is None:
                return None
            placements.append(result)
        if placements[0] is TERMS:
            operands |= dict.fromkeys(self.added, TERMS)
        operands |= dict.fromkeys(self.local, LOCAL)
        operands = {node: operands.get(node, WHOLE) for node in operation.inputs}
        differing = [offered[node] for node in operands if offered[node] != operands[node]]
        if any(placement is LOCAL or isinstance(placement, Rows) for placement in differing):
            return None
        arguments = None
        if self.arguments is not None:
            arguments = self.arguments(next((held for held in placements if isinstance(held, Rows)), rows))
        return SampleCut(tuple(placements) if operation.has_several else placements[0], operands, arguments)

    def _first_rows(self, offered: Offered) -> tuple[Rows, Label] | None:
        """Return the first rows that are offered, with the label of their dimension."""
        for node, labels in self.operands:
            rows = offered[node]
            if isinstance(rows, Rows):
                label = labels[rows.dim] if rows.dim < len(labels) else None
                return None if label is None else (rows, label)
        return None

    def _result(
        self, rows: Rows, label: Label, labels: Labels | Kind, shape: Shape | None, samples: int
    ) -> Placement | None:
        if isinstance(labels, Kind) or shape is None:
            return labels if isinstance(labels, Kind) else WHOLE
        if label in labels:
            placed = replace(rows, dim=[*labels].index(label))
            return placed if shape[placed.dim] == rows.size(samples) else None
        return TERMS if self.sums else None


def _placed(rows: Rows, label: Label, labels: Labels, shape: Shape, samples: int) -> Placement | None:
    """Return how an operand has to be held for rows of a label; None if it does not fit them."""
    if label not in labels:
        return WHOLE
    placed = replace(rows, dim=[*labels].index(label))
    size = shape[placed.dim]
    return placed if size == rows.size(samples) else WHOLE if size == 1 else None
