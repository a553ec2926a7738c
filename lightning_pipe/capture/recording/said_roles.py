"""How what a replayed step logs, returns or gives to metrics makes that of the batch, found by its values.

A replayed step sees one micro-batch, and nothing tells whether a tensor without samples is a mean over them, a count or
an extreme. So the step runs three times without randomness: on some samples, on others, and on both together. The
samples are sorted first, which makes the two parts as unlike each other as they can be. A tensor with the same shape
in the parts and in both together has no samples.

    mean   the mean of the parts, weighted by samples, is what both together have
    sum, max, min   so are they
    mixed  nothing of that: a standard deviation, a ratio of two sums, the value of one sample

Where several fit, `reduce_fx` of a log decides, then a tensor of whole numbers is taken for a sum, and all else for the
first of this list. What is the same in the parts and in both together is `unknown`: it may be constant, or a share that
is zero so far. When it begins to differ between micro-batches, a warning says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.numbers import VALUE, Place, SaidLeaf, call_keys, is_number, leaves_said
from lightning_pipe.capture.steps.record import LogCall, Ref

Reduction: TypeAlias = Literal["mean", "sum", "max", "min"]
SaidRole: TypeAlias = Literal["mean", "sum", "max", "min", "mixed", "unknown"]
Number: TypeAlias = "torch.Tensor | int | float"


@dataclass(frozen=True)
class Said:
    """What is known of the numbers, and tensors without samples, that a step says, but for the loss.

    Attributes:
        roles: by place.
        mixed: where what is mixed is said, in words.
    """

    roles: Mapping[Place, SaidRole]
    mixed: tuple[str, ...]


NOTHING_SAID = Said({}, ())


def said_roles(parts: Sequence[StepRecording], counts: Sequence[int], whole: StepRecording) -> Said:
    """Find the roles of all numbers, and tensors without samples, that every run has said.

    Args:
        parts: what runs on parts of some samples have said.
        counts: numbers of samples of these.
        whole: what a run on all of them has said.
    """
    each = [{leaf.place: number for leaf, number in _numbers_of(part)} for part in parts]
    wanted, found, mixed = _asked_reductions(whole), dict[Place, SaidRole](), dict[str, None]()
    for leaf, number in _numbers_of(whole):
        if not all(leaf.place in one for one in each):
            continue
        own, expected = [torch.as_tensor(one[leaf.place]) for one in each], torch.as_tensor(number)
        if any(one.shape != expected.shape for one in own):
            continue  # it has samples
        is_count = isinstance(number, torch.Tensor) and not number.is_floating_point()
        asked = wanted.get(leaf.place) or ("sum" if is_count else None)
        found[leaf.place] = _role(own, counts, expected, asked)
        if found[leaf.place] == "mixed":
            mixed[str(leaf)] = None
    return Said(found, tuple(mixed))


def _role(parts: Sequence[torch.Tensor], counts: Sequence[int], whole: torch.Tensor, wanted: str | None) -> SaidRole:
    """Return the wanted role if the numbers allow it, else the first that they allow."""
    numbers, expected = torch.stack([part.double() for part in parts]), whole.double()
    if not bool(numbers.isfinite().all() & expected.isfinite().all()) or not expected.numel():
        return "unknown"
    shares = (torch.tensor(counts, dtype=torch.float64) / sum(counts)).reshape(-1, *[1] * expected.ndim)
    of_parts: dict[Reduction, torch.Tensor] = {"max": numbers.amax(0), "min": numbers.amin(0)}
    if whole.dtype != torch.bool:
        of_parts = {"mean": (numbers * shares).sum(0), "sum": numbers.sum(0), **of_parts}
    dtype = whole.dtype if whole.is_floating_point() else torch.float64
    allowed = torch.finfo(dtype).eps ** 0.5 * max(float(expected.abs().max()), float(numbers.abs().max()))
    fitting = [name for name, value in of_parts.items() if float((value - expected).abs().max()) <= allowed]
    if {"max", "min"} <= {*fitting}:
        return "sum" if wanted == "sum" and "sum" in fitting else "unknown"
    return next((name for name in fitting if name == wanted), fitting[0] if fitting else "mixed")


def _asked_reductions(said: StepRecording) -> Mapping[Place, str | None]:
    """Return what `reduce_fx` says, by place of the value of a log."""
    calls = zip(call_keys(said.calls), said.calls, strict=True)
    named = {(*key, VALUE): call.kwargs.get("reduce_fx") for key, call in calls if isinstance(call, LogCall)}
    return {place: getattr(how, "__name__", how) for place, how in named.items()}


def _numbers_of(said: StepRecording) -> Iterator[tuple[SaidLeaf, Number]]:
    """Yield the tensors and numbers that were returned, logged or given to metrics; the loss is left to others."""
    for leaf in leaves_said(said.returned, said.calls):
        if isinstance(leaf.value, Ref):
            if leaf.value.name.isdigit() and not (tensor := said.results[int(leaf.value.name)]).is_complex():
                yield leaf, tensor
        elif is_number(leaf.value):
            yield leaf, leaf.value
