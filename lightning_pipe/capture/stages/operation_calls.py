"""Calls of single operations of a joint graph, described so that equal calls compare equal.

A profiler times every distinct call, and calls one after the other with the tensors that they hand on. Arguments are
those of the stage functions (`emit`): views that the stages run as reshapes are reshapes here too, and random
operations draw from a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.value_sizes import Sizes, TensorSpec
from lightning_pipe.capture.operators import RUN_AS, is_random, takes_output
from lightning_pipe.capture.stages.operations import operation_nodes
from lightning_pipe.capture.steps.keyed_random import keyed
from lightning_pipe.capture.steps.stage_program import RandomKey


@dataclass(frozen=True)
class OperatorCall:
    """One operation with its arguments; tensors among them are `TensorSpec`s, in nested tuples and lists.

    Attributes:
        signature: text that is equal for calls which do the same, in every process.
        target: the function to call.
        args, kwargs: its arguments.
        results: the tensors that it returns, and where in what it returns each lies, as indices from outside in.
    """

    signature: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[TensorSpec, tuple[int, ...]], ...]


def operator_calls(joint: JointGraph, samples: int, device: torch.device) -> Iterator[OperatorCall]:
    """List the operations of a graph, in the order of `core.graph.Graph.operations`, for a number of samples."""
    sizes = Sizes(joint)
    key = RandomKey(seed=0, step=0, microbatch=0)
    known: dict[str, Any] = {}

    def spec(node: fx.Node) -> Any:
        if node.name not in known:
            known[node.name] = sizes.form(node, samples)
        return known[node.name]

    for node in operation_nodes(joint):
        args, kwargs = fx.map_arg(node.args, spec), fx.map_arg(node.kwargs, spec)
        signature = f"{node.target}{args}{dict(kwargs)}"
        results = tuple(_results(node, (), spec))
        operation: Any = node.target
        if is_random(node):
            yield OperatorCall(signature, keyed(operation, 0, device), (key, *args), dict(kwargs), results)
        else:
            yield OperatorCall(signature, RUN_AS.get(operation, operation), args, dict(kwargs), results)


def _results(
    node: fx.Node, where: tuple[int, ...], spec: Callable[[fx.Node], Any]
) -> Iterator[tuple[TensorSpec, tuple[int, ...]]]:
    """Yield what a node returns, if it is a tensor, and every tensor that is taken out of it."""
    described = spec(node)
    if isinstance(described, TensorSpec):
        yield described, where
    for user in node.users:
        if takes_output(user):
            index: Any = user.args[1]
            yield from _results(user, (*where, index), spec)
