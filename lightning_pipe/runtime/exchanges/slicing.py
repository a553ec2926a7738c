"""Slicing of a value by samples, and joining of its parts.

A stage holds a value for its own (`local`) samples of a micro-batch; a message carries the part for the samples that
sender and receiver share. A value with samples is sliced and concatenated along its batch dimension. A value without
samples says by `Value.combine` what it is of its slices' values:

    combine   part of v for k of n samples   whole from parts v_i of n_i out of n samples
    mean      v                              sum of v_i * n_i / n
    sum       v * k / n                      sum of v_i
    same      v                              the first
    max, min  v                              max, min of v_i
    last      v                              the last

Cutting and joining in backward are the transposes of joining and cutting in forward, so that gradients stay exact
whatever the replication: `Value.combine` of the gradient of a value without samples is `sum`; who sends it scales by
share, who receives it adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TypeAlias

import torch

from lightning_pipe.capture.steps.stage_program import Combine, Value
from lightning_pipe.core.program import Samples
from lightning_pipe.errors import PipelineError

Content: TypeAlias = torch.Tensor | int | None  # None is a gradient that was not made
Part: TypeAlias = tuple[Samples, torch.Tensor]


def cut(content: torch.Tensor, value: Value, *, local: Samples, part: Samples) -> torch.Tensor:
    """Return the part of `content` (of the samples `local`) that belongs to the samples `part`; a view where it can."""
    if part == local:
        return content
    if value.batch_dim is not None:
        start = part.start - local.start
        if value.outer == 1:
            return content.narrow(value.batch_dim, start * value.rows, len(part) * value.rows)
        return _joined(_blocks(content, value, len(local)).narrow(value.batch_dim + 1, start, len(part)), value)
    if value.combine == "sum":
        return content * (len(part) / len(local))
    return content


def join(parts: Sequence[Part], value: Value, *, local: Samples) -> torch.Tensor:
    """Return the content for the samples `local` from parts that cover them without overlap.

    Raises:
        PipelineError: if the parts leave a gap, overlap or reach beyond `local`.
    """
    if len(parts) == 1 and parts[0][0] == local:
        return parts[0][1]
    ordered = sorted(parts, key=lambda part: part[0])
    edges = [local.start, *(samples.stop for samples, _ in ordered)]
    if [samples.start for samples, _ in ordered] != edges[:-1] or edges[-1] != local.stop:
        found = ", ".join(str(samples) for samples, _ in ordered) or "nothing"
        raise PipelineError(f"Value {value.name} is needed for samples {local}, but received for {found}.")
    return combine(ordered, value, how="cat" if value.batch_dim is not None else value.combine)


def combine(parts: Sequence[Part], value: Value, *, how: Combine) -> torch.Tensor:
    """Return one content from those of slices, in the given order (see the table above)."""
    if len(parts) == 1 or how == "same":
        return parts[0][1]
    contents = [content for _, content in parts]
    match how:
        case "cat":
            assert value.batch_dim is not None, f"{value.name} is to be concatenated but has no samples"
            if value.outer == 1:
                return torch.cat(contents, dim=value.batch_dim)
            blocks = [_blocks(content, value, len(samples)) for samples, content in parts]
            return _joined(torch.cat(blocks, dim=value.batch_dim + 1), value)
        case "mean":
            return weighted_mean(contents, [len(samples) for samples, _ in parts])
        case "sum":
            return reduce(torch.add, contents)
        case "max":
            return reduce(torch.maximum, contents)
        case "min":
            return reduce(torch.minimum, contents)
        case "last":
            return contents[-1]
    raise AssertionError(f"{value.name} combines by {how!r}")


def _blocks(content: torch.Tensor, value: Value, samples: int) -> torch.Tensor:
    """Return a content whose samples follow each other several times, with a dimension of their own."""
    assert value.batch_dim is not None, "it has samples"
    blocks: torch.Tensor = content.unflatten(value.batch_dim, (value.outer, samples, value.rows))
    return blocks


def _joined(blocks: torch.Tensor, value: Value) -> torch.Tensor:
    assert value.batch_dim is not None, "it has samples"
    return blocks.flatten(value.batch_dim, value.batch_dim + 2)


def weighted_mean(contents: Sequence[torch.Tensor], weights: Sequence[int]) -> torch.Tensor:
    """Return the sum of content times share of the weights, added in the given order, in the contents' type."""
    total = sum(weights)
    return reduce(torch.add, (content * (weight / total) for content, weight in zip(contents, weights, strict=True)))


def to_tensor(content: Content, *, device: torch.device) -> torch.Tensor:
    """Return what travels for a content, on the device: itself, or a 0-dim int64 tensor for a Python integer."""
    if isinstance(content, torch.Tensor):  # a step may make numbers on the host, as `torch.tensor(len(y))` does
        return content if content.device == device else content.to(device)
    return torch.tensor(content, dtype=torch.int64, device=device)


def from_tensor(tensor: torch.Tensor, value: Value) -> Content:
    """Return the content from what travelled."""
    return int(tensor.item()) if value.dtype is None else tensor


def buffer_for(
    value: Value, samples: int, *, device: torch.device, of: int = 0, size: Sequence[int] | None = None
) -> torch.Tensor:
    """Allocate the tensor that receives a value, in the value's memory order.

    Args:
        value: the value.
        samples: number of samples that it is of.
        device: where it is to lie.
        of: number of samples of the batch.
        size: its shape, where that is not known from the samples.
    """
    if value.dtype is None:
        return torch.empty((), dtype=torch.int64, device=device)
    size = value.shape(samples, of) if size is None else size
    order = value.order or tuple(range(len(size)))
    return torch.empty_permuted(size, order, dtype=value.dtype, device=device)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with memory of its own if it is a view of more, all of which it would keep."""
    is_part = tensor.layout == torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes
    return tensor.clone() if is_part else tensor


def packed(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """Return a contiguous tensor with the content of a value; of a buffer from `buffer_for` it is a view."""
    return (tensor.permute(value.order) if value.order else tensor).contiguous()
