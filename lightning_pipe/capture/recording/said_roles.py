"""How single numbers that a replayed step logs or returns make those of the batch, found by their values.

A replayed step sees one micro-batch, and nothing tells whether a tensor without dimensions is a mean over its samples,
a count or an extreme. So the step runs three times without randomness: on some samples, on others, and on both
together. The samples are sorted first, which makes the two parts as unlike each other as they can be.

    mean   the mean of the parts, weighted by samples, is what both together have
    sum, max, min   so are they
    mixed  nothing of that: a standard deviation, a ratio of two sums, the value of one sample

Where several fit, `reduce_fx` of a log decides, then a tensor of whole numbers is taken for a sum, and all else for the
first of this list. What is the same in the parts and in both together has no role: it may be constant, or a share that
is zero so far. When it begins to differ between micro-batches, a warning says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.numbers import RETURNED, VALUE, Place, call_keys
from lightning_pipe.capture.steps.record import LogCall, Ref
from lightning_pipe.capture.steps.trees import branches

Reduction: TypeAlias = Literal["mean", "sum", "max", "min"]
SaidRole: TypeAlias = Literal["mean", "sum", "max", "min", "mixed"]
Number: TypeAlias = "torch.Tensor | int | float"


@dataclass(frozen=True)
class Said:
    """What is known of the single numbers that a step says, but for the loss.

    Attributes:
        roles: by place.
        mixed: lines that log what is mixed, by name.
    """

    roles: Mapping[Place, SaidRole]
    mixed: Mapping[str, str]


NOTHING_SAID = Said({}, {})


def said_roles(parts: Sequence[StepRecording], counts: Sequence[int], whole: StepRecording) -> Said:
    """Find the roles of all single numbers that every run has said.

    Args:
        parts: what runs on parts of some samples have said.
        counts: numbers of samples of these.
        whole: what a run on all of them has said.
    """
    each, wanted = [dict(_numbers_of(part)) for part in parts], _asked_reductions(whole)
    found: dict[Place, SaidRole] = {}
    for place, value in _numbers_of(whole):
        if all(place in one for one in each):
            role = _role([one[place] for one in each], counts, value, wanted.get(place))
            found |= {place: role} if role is not None else {}
    calls = zip(call_keys(whole.calls), whole.calls, strict=True)
    mixed = {c.name: c.line for key, c in calls if isinstance(c, LogCall) and found.get((*key, VALUE)) == "mixed"}
    return Said(found, mixed)


def _role(parts: Sequence[Number], counts: Sequence[int], whole: Number, wanted: str | None) -> SaidRole | None:
    """Return a role, None if the numbers do not tell."""
    numbers, expected = [float(part) for part in parts], float(whole)
    if not all(map(math.isfinite, (*numbers, expected))):
        return None
    of_parts: dict[Reduction, float] = {
        "mean": sum(n * c for n, c in zip(numbers, counts, strict=True)) / sum(counts),
        "sum": sum(numbers),
        "max": max(numbers),
        "min": min(numbers),
    }
    is_count = isinstance(whole, torch.Tensor) and not whole.is_floating_point()
    dtype = whole.dtype if isinstance(whole, torch.Tensor) and whole.is_floating_point() else torch.float64
    allowed = torch.finfo(dtype).eps ** 0.5 * max(abs(expected), *map(abs, numbers))
    fitting = [name for name, value in of_parts.items() if abs(value - expected) <= allowed]
    preferred = [name for name in get_args(Reduction) if name == wanted or (name == "sum" and is_count)]
    if {"mean", "max", "min"} <= {*fitting}:
        return "sum" if "sum" in fitting and "sum" in preferred else None
    return next((name for name in (*preferred, *fitting) if name in fitting), "mixed")


def _asked_reductions(said: StepRecording) -> Mapping[Place, str | None]:
    """Return what `reduce_fx` says, by place of the value of a log."""
    calls = zip(call_keys(said.calls), said.calls, strict=True)
    named = {(*key, VALUE): call.kwargs.get("reduce_fx") for key, call in calls if isinstance(call, LogCall)}
    return {place: getattr(how, "__name__", how) for place, how in named.items()}


def _numbers_of(said: StepRecording) -> Iterator[tuple[Place, Number]]:
    """Yield the tensors without dimensions and the numbers that were returned or logged, by place."""
    yield from _inside(said.returned, RETURNED, lambda ref: _result(said, ref))
    for key, call in zip(call_keys(said.calls), said.calls, strict=True):
        if isinstance(call, LogCall):
            yield from _inside(call.value, (*key, VALUE), lambda ref: _result(said, ref))


def _result(said: StepRecording, ref: Ref) -> torch.Tensor | None:
    return said.results[int(ref.name)] if ref.name.isdigit() else None  # the loss is left to others


def _inside(
    value: object, place: Place, tensor_of: Callable[[Ref], torch.Tensor | None]
) -> Iterator[tuple[Place, Number]]:
    if isinstance(value, Ref):
        tensor = tensor_of(value)
        if tensor is not None and not tensor.ndim and not tensor.is_complex():
            yield place, tensor
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, value
    elif (branched := branches(value)) is not None:
        for key, item in branched.items():
            yield from _inside(item, (*place, str(key)), tensor_of)
