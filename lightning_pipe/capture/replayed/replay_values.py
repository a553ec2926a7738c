"""Structure of the values that units return: tensors whose shapes follow from the number of samples.

The samples of a batch that is not cut need not tell how large what is made of it is: graphs have nodes, texts have
tokens. There each stage tells the next one the sizes of what all units before it return (`UnitSizes`). What a stage is
given comes with its sizes (`runtime.exchanges.sized_messages`); fake tensors of the other sizes go through glue.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch

from lightning_pipe.capture.recording.units import Unit, UnitOutput
from lightning_pipe.capture.steps.batch import Leaf, LeafSlot
from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.record import LogCall, LoggerCall, ObjectCall, Ref
from lightning_pipe.capture.steps.stage_program import Value
from lightning_pipe.capture.steps.trees import found_in, mapped
from lightning_pipe.capture.torch_private import version_of

LOSS = "loss"  # value name of the loss of a replayed step


def size_of(output: UnitOutput, samples: int) -> tuple[int, ...]:
    """Return the shape of an output for a number of samples."""
    if output.batch_dim is None:
        return output.shape
    dim = output.batch_dim
    return (*output.shape[:dim], output.rows * samples, *output.shape[dim + 1 :])


def leaf_size(leaf: Leaf, samples: int, batch_dim: int | None) -> tuple[int, ...]:
    """Return the shape of a tensor of the batch for a number of samples; without `batch_dim` batches are not cut."""
    if batch_dim is None or len(leaf.shape) <= batch_dim:
        return leaf.shape
    return (*leaf.shape[:batch_dim], samples, *leaf.shape[batch_dim + 1 :])


def tensors_in(result: Any) -> list[torch.Tensor]:
    """List the tensors of what a unit returned, in order."""
    return [*found_in(result, torch.Tensor)]


def replaced(result: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return what a unit returned with other tensors in its places."""
    waiting = iter(tensors)
    return mapped(result, torch.Tensor, lambda _: next(waiting))


def filled(template: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return a template with tensors in its slots."""
    return mapped(template, LeafSlot, lambda slot: tensors[slot.index])


def finish(recording: StepRecording, output: Any, loss: torch.Tensor | None) -> None:
    """Complete the words of a play by what it returned; the loss is named `loss` wherever it is said."""
    original = output.get("loss") if isinstance(output, dict) and loss is not None else output
    arrays = recording.with_arrays
    recording.returned = arrays(recording.lift(output, None if loss is None else original))
    recording.calls = [_with(_naming_loss(call, recording, loss), arrays) for call in recording.calls]
    recording.outputs = [call.mapped(partial(_naming_printed_loss, recording, loss)) for call in recording.outputs]
    recording.results = [tensor.detach() for tensor in recording.results]


def _naming_printed_loss(recording: StepRecording, loss: torch.Tensor | None, said: Any) -> Any:
    """Return output that says the loss where the loss is printed as the step returns it."""

    def named(ref: Ref) -> Ref:
        tensor, version = recording.printed_tensors.get(ref.name, (None, 0))
        is_same = loss is not None and tensor is not None and tensor.data_ptr() == loss.data_ptr()
        is_loss = is_same and tensor is not None and tensor.numel() == 1 and version_of(tensor) == version
        return Ref(LOSS) if is_loss else ref

    return mapped(said, Ref, named)


def _with(call: LogCall | ObjectCall, function: Callable[[Any], Any]) -> LogCall | ObjectCall:
    """Return a call with what a function makes of its arguments."""
    if isinstance(call, LogCall):
        return replace(call, value=function(call.value))
    return replace(call, args=function(call.args), kwargs=function(call.kwargs))


def _naming_loss(
    call: LogCall | ObjectCall, recording: StepRecording, loss: torch.Tensor | None
) -> LogCall | ObjectCall:
    """Return a call that says the loss where the step logs it, so that it is combined as the loss is."""
    if loss is None:
        return call

    def named(ref: Ref) -> Ref:
        if ref.name == LOSS:
            return ref
        logged = recording.results[int(ref.name)]
        is_loss = logged.numel() == 1 and logged.data_ptr() == loss.data_ptr() and logged.dtype == loss.dtype
        return Ref(LOSS) if is_loss else ref

    if isinstance(call, LogCall):
        return replace(call, value=mapped(call.value, Ref, named))
    return replace(call, args=mapped(call.args, Ref, named)) if isinstance(call, LoggerCall) else call


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
