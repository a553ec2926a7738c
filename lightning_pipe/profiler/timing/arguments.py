"""Arguments for the timing of operations that are only described: tensors of equal type, shape and strides.

Every argument has the type, shape and strides that the step gives it; its numbers are chosen so that they change no
time: floats are moderate (no overflow, and no denormals, which CPUs treat slowly), and scales and variances positive;
truth values are random; integers are zeros, which are legal as whatever they are used, except where an operator reads
them as indices: there they are random below the bound that the operator's other arguments say, because equal indices
would be quicker to read and slower to add to than those of training. Random numbers come from generators of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from lightning_pipe.capture.graphs.value_sizes import TensorSpec
from lightning_pipe.capture.stages.operation_calls import OperatorCall

_BLOCK = 2**16  # random floats that are drawn; larger tensors repeat them
_SCALE = 0.02  # of floats in matrices: as parameters are initialised, so that products keep their order of magnitude


class Maker:
    """Make tensors on a device from their description.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device)
        self._generator.manual_seed(0)
        self._normal = torch.randn(_BLOCK, device=device, generator=self._generator)

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor with content."""
        return self._strided(self._content(spec, _extent(spec)), spec)

    def indices(self, spec: TensorSpec, bound: int) -> torch.Tensor:
        """Return a tensor of random integers from 0 up to a bound."""
        high = max(1, bound)
        content = torch.randint(high, (_extent(spec),), device=self._device, generator=self._generator)
        return self._strided(content.to(spec.dtype), spec)

    def _content(self, spec: TensorSpec, count: int) -> torch.Tensor:
        if spec.dtype == torch.bool:
            return torch.rand(count, device=self._device, generator=self._generator) < 0.5
        if not (spec.dtype.is_floating_point or spec.dtype.is_complex):
            return torch.zeros(count, dtype=spec.dtype, device=self._device)
        blocks = torch.empty(math.ceil(count / _BLOCK), _BLOCK, dtype=spec.dtype, device=self._device)
        blocks.copy_(self._normal * _SCALE if len(spec.shape) > 1 else 1.0 + self._normal.clamp(-3, 3) / 10)
        return blocks.view(-1)[:count]

    def _strided(self, content: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        return content.as_strided(spec.shape, spec.stride)


def _extent(spec: TensorSpec) -> int:
    """Return the elements that the memory of a tensor spans."""
    if not all(spec.shape):
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))


def bytes_of(spec: TensorSpec) -> int:
    """Return the bytes that the memory of a tensor spans."""
    return _extent(spec) * spec.dtype.itemsize


def specs_of(value: Any) -> Iterator[TensorSpec]:
    """Yield the descriptions of tensors in nested arguments."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from specs_of(item)
    elif isinstance(value, dict):
        yield from specs_of(list(value.values()))


def index_bounds(call: OperatorCall) -> dict[int, int]:
    """Return, by `id` of its description, the bound of every argument that an operator reads as indices.

    One that is read along several dimensions is below all of their bounds.
    """
    operator = call.signature.partition("(")[0].removeprefix("aten.")
    find = _INDEXED.get(operator.partition(".")[0])
    bounds: dict[int, int] = {}
    for spec, bound in find(*call.args) if find is not None else ():
        if isinstance(spec, TensorSpec) and spec.dtype in (torch.int64, torch.int32):
            bounds[id(spec)] = min(bound, bounds.get(id(spec), bound))
    return bounds


_Bounds = Iterator[tuple[Any, int]]  # (argument, bound of its values)


def _rows(weight: Any, indices: Any, *_: Any) -> _Bounds:
    yield indices, weight.shape[0]


def _along(tensor: Any, dim: int, indices: Any, *_: Any) -> _Bounds:
    yield indices, tensor.shape[dim] if tensor.shape else 1


def _each(tensor: Any, indices: Any, *_: Any) -> _Bounds:
    for dim, index in enumerate(indices):
        yield index, tensor.shape[dim]


def _anywhere(tensor: Any, indices: Any, *_: Any) -> _Bounds:
    yield indices, math.prod(tensor.shape)


def _classes(scores: Any, target: Any, *_: Any) -> _Bounds:
    yield target, scores.shape[1 if len(scores.shape) > 1 else 0]


def _classes_backward(_gradient: Any, scores: Any, target: Any, *_: Any) -> _Bounds:
    return _classes(scores, target)


def _rows_backward(_gradient: Any, indices: Any, rows: int, *_: Any) -> _Bounds:
    yield indices, rows


def _bag_backward(_gradient: Any, indices: Any, *others: Any) -> _Bounds:
    yield indices, others[4]  # after offsets, bags, sizes and maximal indices


_INDEXED: Mapping[str, Callable[..., _Bounds]] = {
    "embedding": _rows,
    "embedding_dense_backward": _rows_backward,
    "_embedding_bag": _rows,
    "_embedding_bag_forward_only": _rows,
    "_embedding_bag_backward": _bag_backward,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add"), _along),
    **dict.fromkeys(("index_copy", "index_fill"), _along),
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "_unsafe_index_put"), _each),
    **dict.fromkeys(("take", "put"), _anywhere),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _classes),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _classes_backward),
}
