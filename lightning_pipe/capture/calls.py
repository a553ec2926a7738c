"""How is one operation of a joint graph run by itself? With arguments described, so that equal calls are seen as equal.

A profiler times every distinct call once. Arguments are those of the stage functions (`emit`): views that the stages
run as reshapes are reshapes here too, and random operations draw from a key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lightning_pipe.capture.assign import is_random
from lightning_pipe.capture.emit import RESHAPED
from lightning_pipe.capture.joint import JointGraph
from lightning_pipe.capture.operations import operation_nodes
from lightning_pipe.capture.randomness import keyed
from lightning_pipe.capture.sizes import Sizes
from lightning_pipe.capture.stage_program import RandomKey


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its content."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class OperatorCall:
    """One operation with its arguments; tensors among them are `TensorSpec`s, in nested tuples and lists.

    Attributes:
        signature: text that is equal for calls which do the same, in every process.
        target: the function to call.
        args, kwargs: its arguments.
    """

    signature: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def operator_calls(joint: JointGraph, samples: int, device: torch.device) -> Iterator[OperatorCall]:
    """List the operations of a graph, in the order of `core.graph.Graph.operations`, for a number of samples."""
    sizes = Sizes(joint)
    for node in operation_nodes(joint):
        args = fx.map_arg(node.args, lambda n: _spec(n, joint, sizes, samples))
        kwargs = fx.map_arg(node.kwargs, lambda n: _spec(n, joint, sizes, samples))
        signature = f"{node.target}{args}{dict(kwargs)}"
        if is_random(node):
            key = RandomKey(seed=0, step=0, microbatch=0)
            yield OperatorCall(signature, keyed(node.target, 0, device), (key, *args), dict(kwargs))
        else:
            yield OperatorCall(signature, RESHAPED.get(node.target, node.target), args, dict(kwargs))


def _spec(node: fx.Node, joint: JointGraph, sizes: Sizes, samples: int) -> Any:
    if node.op == "get_attr":
        return _described(getattr(joint.module, str(node.target)), sizes, samples)
    return _described(node.meta.get("val"), sizes, samples)


def _described(value: Any, sizes: Sizes, samples: int) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorSpec(value.dtype, sizes.shape(value, samples), sizes.stride(value, samples))
    if isinstance(value, torch.SymInt):
        return sizes.number(value, samples)
    if isinstance(value, (tuple, list)):
        return type(value)(_described(item, sizes, samples) for item in value)
    return value
