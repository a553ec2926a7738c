"""Sizes of what units return in batches that are not cut: each stage tells the next one those of all units before it.

The samples of a batch need not tell how large what is made of it is: graphs have nodes, texts have tokens. What a stage
is given comes with its sizes (`runtime.exchanges.sized_messages`). For the units that it is not given it needs their
sizes alone, as fake tensors go through glue in their place.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from lightning_pipe.capture.recording.units import Unit
from lightning_pipe.capture.steps.stage_program import Value

UnitSizes: TypeAlias = dict[int, tuple[tuple[int, ...], ...]]  # unit -> shapes of its outputs
_UNKNOWN = -1  # of a unit that was not called


def sizes_name(stage: int) -> str:
    """Name the value by which a stage tells the sizes of the units up to its end."""
    return f"sizes:{stage}"


def sizes_value(units: Sequence[Unit], stage: int) -> Value:
    """Return what is known of that value."""
    length = sum(len(output.shape) for unit in units for output in unit.outputs)
    return Value(sizes_name(stage), torch.int64, lambda samples: (length,), None)


def sizes_as_tensor(units: Sequence[Unit], sizes: Mapping[int, Sequence[Sequence[int]]]) -> torch.Tensor:
    """Return sizes as a tensor of the host."""
    numbers = [
        size
        for k, unit in enumerate(units)
        for i, output in enumerate(unit.outputs)
        for size in (sizes[k][i] if k in sizes else [_UNKNOWN] * len(output.shape))
    ]
    return torch.tensor(numbers, dtype=torch.int64)


def sizes_of_tensor(units: Sequence[Unit], told: torch.Tensor) -> UnitSizes:
    """Return the sizes that a stage was told."""
    numbers = iter(told.tolist())
    sizes = {
        k: tuple(tuple(itertools.islice(numbers, len(output.shape))) for output in unit.outputs)
        for k, unit in enumerate(units)
    }
    return {k: shapes for k, shapes in sizes.items() if not any(_UNKNOWN in shape for shape in shapes)}


def have_form(unit: Unit, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors have the number, the types and the dimensions of a unit's outputs."""
    forms = [(tensor.dtype, tensor.dim()) for tensor in tensors]
    return forms == [(output.dtype, len(output.shape)) for output in unit.outputs]
