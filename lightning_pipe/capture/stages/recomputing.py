"""The halves of a recomputing backward as nodes of the joint graph, from names of operations (`core.policy`).

Backward nodes keep the order of the joint graph. Each recomputed node stands just before its first reader, so that it
is not in memory any sooner. Nodes that only take a result out of several follow their operation at once.

    split   I = what the gradients that are sent need       W = all other backward nodes
    policy  I = the same, what reads recomputed values, and what is recomputed          W = the rest

The split knows more than the policy where gradients of ties travel (`exact_ties`): what it needs in I stays there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from torch import fx

from lightning_pipe.capture.operators import takes_output
from lightning_pipe.core.policy import RecomputingBackward


def recomputing_halves(
    input_grad: Sequence[str], weight_grad: Sequence[str], *, policy: RecomputingBackward, nodes: Mapping[str, fx.Node]
) -> tuple[list[str], list[str]]:
    """Return what I and W run, in order, when a stage recomputes.

    Args:
        input_grad: what I runs when all is kept, in the order of the joint graph.
        weight_grad: the same of W.
        policy: the operations of both when the stage recomputes.
        nodes: of the joint graph, in its order.
    """
    position = {name: i for i, name in enumerate(nodes)}
    own = {*input_grad, *weight_grad}
    moved = {*_with_results(policy.input_grad, nodes)}
    early = sorted({*input_grad, *(moved & own)}, key=position.__getitem__)
    late = {name for name in weight_grad if name not in moved}
    ahead = _run_before(policy.input_grad, own)
    run = [n for name in early for n in (*_with_results(ahead.get(name, ()), nodes), name)]
    kept = {n for n in run if _is_result(nodes[n]) and n not in own and n not in policy.made}
    first = [n for n in run if n not in kept]
    repeated = {name for name in _with_results(policy.weight_grad, nodes) if name not in own}
    return list(dict.fromkeys(first)), sorted(late | repeated, key=position.__getitem__)


def _run_before(operations: Iterable[str], own: Set[str]) -> dict[str, tuple[str, ...]]:
    """Return, by own backward operation, the others that run between the own one before it and itself."""
    found: dict[str, tuple[str, ...]] = {}
    waiting: list[str] = []
    for name in operations:
        if name in own:
            found[name] = tuple(waiting)
            waiting = []
        else:
            waiting.append(name)
    return found


def _with_results(operations: Iterable[str], nodes: Mapping[str, fx.Node]) -> Iterator[str]:
    """Yield operations, each followed by the nodes that take its results apart."""
    for name in operations:
        yield name
        yield from _with_results([user.name for user in nodes[name].users if _is_result(user)], nodes)


def _is_result(node: fx.Node) -> bool:
    """Return whether a node only takes one of the results of an operation."""
    return takes_output(node)
