"""Check of a micro-batch's graph by its shapes: a rule that is wrong about sizes is seen before anything runs.

Every operation runs on tensors without data, which have the shapes that the graph declares for other numbers of samples
than those of the trace. Its result must have the declared shape, as it has at the numbers of the trace. A size of the
trace that stands as a number where it should follow from the samples gives another shape. So do the batch's samples
where the micro-batch's are meant.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.node import map_aggregate

from lightning_pipe.capture.graphs.joint_graph import JointGraph
from lightning_pipe.capture.graphs.value_sizes import TensorSpec, is_size
from lightning_pipe.capture.operators import RUN_AS, takes_output
from lightning_pipe.capture.torch_private import OpOverload

_SAMPLES = (7, 11, 12, 16, 24, 64)  # of a batch; the trace may hold for some of them only
_MICROBATCH = 3  # samples; no divisor of the first two, which also differ from each other and their difference


def misshapen(joint: JointGraph, whole: JointGraph) -> str:
    """Return the name of the first operation whose result has another shape than declared; "" if there is none.

    Args:
        joint: the graph of a micro-batch.
        whole: the graph of the whole batch that it is cut out of.
    """
    samples = joint.batch_samples
    fitting = (count for count in _SAMPLES if count != samples and not whole.fits(count))
    batch = samples if whole.symbol is None else next(fitting, samples)
    traced = _Shapes(joint, samples, samples)  # a single micro-batch
    small = _Shapes(joint, min(_MICROBATCH, batch), batch)
    nodes = joint.module.graph.nodes
    return next((n.name for n in nodes if not small.are_as_declared(n) and traced.are_as_declared(n)), "")


_NEEDS_DATA, _RAISES = object(), object()  # in the place of the result of an operation


class _Shapes:
    """Values without data, of the shapes that a graph declares for numbers of samples of a micro-batch and a batch."""

    def __init__(self, joint: JointGraph, samples: int, batch_samples: int) -> None:
        self._joint, self._samples, self._batch_samples = joint, samples, batch_samples
        self._known: dict[sympy.Basic, Any] = {}
        self._results: dict[str, Any] = {}  # by operation and arguments: layers repeat

    def are_as_declared(self, node: fx.Node) -> bool:
        """Return whether an operation gives the declared shapes; also where that cannot be found out without data."""
        value = node.meta.get("val")
        is_operation = node.op == "call_function" and isinstance(node.target, OpOverload)
        if not is_operation or is_size(node) or takes_output(node) or not _is_dense(node, *node.all_input_nodes):
            return True
        target: Any = RUN_AS.get(node.target, node.target)
        arguments = fx.map_arg((node.args, node.kwargs), lambda source: self._spec(source.meta["val"]))
        call = f"{target} {arguments}"
        if call not in self._results:
            self._results[call] = _result(target, arguments)
        result = self._results[call]
        return result is _NEEDS_DATA or (result is not _RAISES and self._fits(result, value))

    def _fits(self, result: Any, declared: Any) -> bool:
        if isinstance(declared, tuple | list):
            return all(map(self._fits, result, declared))
        if not isinstance(declared, torch.Tensor) or not isinstance(result, torch.Tensor):
            return True
        return tuple(result.shape) == tuple(map(self._number, declared.shape))

    def _spec(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return TensorSpec(value.dtype, tuple(map(self._number, value.shape)), ())
        if isinstance(value, tuple | list):
            return type(value)(map(self._spec, value))
        return self._number(value)

    def _number(self, size: Any) -> Any:
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return size
        expression = size.node.expr
        if expression not in self._known:
            value = self._joint.at(expression, self._samples, batch_samples=self._batch_samples)
            is_truth = isinstance(size, torch.SymBool)
            self._known[expression] = bool(value) if is_truth else int(value) if value.is_integer else float(value)
        return self._known[expression]


def _result(target: Any, arguments: Any) -> Any:
    """Return what an operation gives for tensors without data; `_NEEDS_DATA` or `_RAISES` if it gives nothing."""

    def without_data(argument: Any) -> Any:
        is_tensor = isinstance(argument, TensorSpec)
        return torch.empty(argument.shape, dtype=argument.dtype, device="meta") if is_tensor else argument

    args, kwargs = map_aggregate(arguments, without_data)
    try:
        return target(*args, **kwargs)
    except NotImplementedError:
        return _NEEDS_DATA
    except Exception:
        return _RAISES


def _is_dense(*nodes: fx.Node) -> bool:
    values = [node.meta.get("val") for node in nodes]
    tensors = [item for value in values for item in (value if isinstance(value, tuple | list) else [value])]
    return all(tensor.layout is torch.strided for tensor in tensors if isinstance(tensor, torch.Tensor))
