"""Rules: how an operator is cut along samples, by its name. A rule knows its operator, nothing of the graph.

An operator without a rule, or whose rule fits no operand, takes whole values. That is right for every operator, and
only late; a missing rule costs time, never a number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from lightning_pipe.capture.slicing.operation import Arguments, BatchOperation, Label, Offered, Pattern, SampleCut
from lightning_pipe.capture.slicing.placement import Rows

Rule = Callable[[BatchOperation, Offered], SampleCut | None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of these names."""

    def add(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return add


def pattern(
    *names: str,
) -> Callable[[Callable[[BatchOperation], Pattern | None]], Callable[[BatchOperation], Pattern | None]]:
    """Register for operators of these names that dimensions go along with each other whatever is offered."""

    def add(function: Callable[[BatchOperation], Pattern | None]) -> Callable[[BatchOperation], Pattern | None]:
        def cut(operation: BatchOperation, offered: Offered) -> SampleCut | None:
            dimensions = function(operation)
            return None if dimensions is None else dimensions.cut(operation, offered)

        RULES.update(dict.fromkeys(names, cut))
        return function

    return add


def rule_of(operation: BatchOperation) -> Rule | None:
    """Return the rule of an operator: its own, or that of operators that work element by element."""
    target = operation.node.target
    by_torch = torch.Tag.pointwise in getattr(target, "tags", ())
    return RULES.get(operation.name) or (RULES["clone"] if by_torch else None)


def aligned(
    operation: BatchOperation, operands: Iterable[fx.Node], rank: int, *, without: Iterable[int] = ()
) -> list[tuple[fx.Node, list[Label]]]:
    """Label operands as they are broadcast to so many dimensions, but for those in which elements meet."""
    labels = labels_of(rank, without=without)
    return [(node, labels[rank - len(operation.shape_of(node)) :]) for node in operands]


def labels_of(rank: int, *, without: Iterable[int] = ()) -> list[Label]:
    """Label so many dimensions by their number, but for those in which elements meet."""
    meeting = {*without}
    return [None if dim in meeting else dim for dim in range(rank)]


def resized(operation: BatchOperation, name: str) -> Callable[[Rows], Arguments]:
    """Return what makes the argument `name`, the shape of the result, that of a micro-batch."""

    def arguments_of(rows: Rows) -> Arguments:
        shape = operation.shape
        return lambda samples: {name: [*shape[: rows.dim], rows.size(samples), *shape[rows.dim + 1 :]]}

    return arguments_of
