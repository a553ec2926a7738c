"""How what a replayed step logs, returns or gives to metrics makes that of the batch, found by its values.

A replayed step sees one micro-batch, and nothing tells whether a tensor without samples is a mean over them, a count or
an extreme. So the step runs without randomness: on some samples, on others, and on both together, twice. At first the
samples are sorted, so that the two parts are as unlike each other as they can be; then they are as alike as that goes,
in another order. A tensor that has the same shape in the parts and in both together has no samples.

    mean   the mean of the parts, weighted by samples, is what both together have, both times
    sum, max, min   so are they
    mixed  nothing of that: a standard deviation, a ratio of two sums, the value of one sample

Where several fit, `reduce_fx` of a log decides, then a tensor of whole numbers is taken for a sum, and all else for the
first of this list. What is the same in the parts and in both together is `unknown`: it may be constant, or a share that
is zero so far. When it begins to differ between micro-batches, a warning says so.

Tensors with samples are joined along the dimension along which the parts make what both together have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import torch

from lightning_pipe.capture.steps.call_recording import StepRecording
from lightning_pipe.capture.steps.numbers import VALUE, Place, SaidLeaf, call_keys, is_number, leaves_said
from lightning_pipe.capture.steps.record import LogCall, Ref

Reduction: TypeAlias = Literal["mean", "sum", "max", "min"]
SaidRole: TypeAlias = Literal["mean", "sum", "max", "min", "mixed", "unknown"]
Number: TypeAlias = "torch.Tensor | int | float"


@dataclass(frozen=True)
class Said:
    """What is known of the numbers and tensors that a step says, but for the loss.

    Attributes:
        roles: of those without samples, by place.
        joins: dimensions along which those with samples are joined, by place; that of others is the first.
        mixed: where what is mixed is said, in words.
    """

    roles: Mapping[Place, SaidRole] = field(default_factory=dict)
    joins: Mapping[Place, int] = field(default_factory=dict)
    mixed: tuple[str, ...] = ()


NOTHING_SAID = Said()


@dataclass(frozen=True)
class Trial:
    """What a step has said of parts of some samples, and of all of them in the same order.

    Attributes:
        parts: what it said of the parts.
        counts: numbers of samples of these.
        whole: what it said of all.
    """

    parts: tuple[StepRecording, ...]
    counts: tuple[int, ...]
    whole: StepRecording


def says_something(said: StepRecording) -> bool:
    """Return whether a step says more than its loss."""
    return any(_numbers_of(said))


def said_roles(trials: Sequence[Trial]) -> Said:
    """Find how all is combined that every run has said."""
    tables = [_Table.of(trial) for trial in trials]
    wanted, roles, joins = _asked_reductions(trials[0].whole), dict[Place, SaidRole](), dict[Place, int]()
    mixed: dict[str, None] = {}
    for leaf, number in _numbers_of(trials[0].whole):
        place = leaf.place
        if not all(place in row for table in tables for row in (*table.parts, table.whole)):
            continue
        if all(table.has_samples(place) for table in tables):
            dim, *others = (table.joined_along(place) for table in tables)
            if dim is not None and {*others} <= {dim}:
                joins[place] = dim
            else:
                mixed[str(leaf)] = None
            continue
        is_count = isinstance(number, torch.Tensor) and not number.is_floating_point()
        roles[place] = _role(tables, place, wanted.get(place) or ("sum" if is_count else None))
        if roles[place] == "mixed":
            mixed[str(leaf)] = None
    return Said(roles, joins, tuple(mixed))


@dataclass(frozen=True)
class _Table:
    """The tensors and numbers of a trial, by place."""

    parts: tuple[Mapping[Place, torch.Tensor], ...]
    counts: tuple[int, ...]
    whole: Mapping[Place, torch.Tensor]

    @classmethod
    def of(cls, trial: Trial) -> _Table:
        def row(said: StepRecording) -> dict[Place, torch.Tensor]:
            return {leaf.place: torch.as_tensor(number) for leaf, number in _numbers_of(said)}

        return cls(tuple(map(row, trial.parts)), trial.counts, row(trial.whole))

    def has_samples(self, place: Place) -> bool:
        """Return whether a tensor has another shape in the parts than in the whole."""
        return any(part[place].shape != self.whole[place].shape for part in self.parts)

    def joined_along(self, place: Place) -> int | None:
        """Return the dimension along which the parts make the whole; None if there is none."""
        whole, parts = self.whole[place], [part[place] for part in self.parts]
        for dim in range(whole.ndim):
            rest = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (whole, *parts)}
            if len(rest) == 1 and sum(part.shape[dim] for part in parts) == whole.shape[dim]:
                joined = torch.cat(parts, dim)
                return dim if _is_close(joined, whole, _allowed([joined, whole])) else None
        return None

    def fitting(self, place: Place) -> set[Reduction]:
        """Return the reductions of the parts that give the whole."""
        whole, numbers = self.whole[place], torch.stack([part[place] for part in self.parts])
        if not bool(numbers.isfinite().all() & whole.isfinite().all()):
            return {*get_args(Reduction)}  # nothing is known
        of_parts: dict[Reduction, torch.Tensor] = {"max": numbers.amax(0), "min": numbers.amin(0)}
        if whole.dtype != torch.bool:
            shares = torch.tensor(self.counts, dtype=torch.float64) / sum(self.counts)
            of_parts["mean"] = (numbers.double() * shares.reshape(-1, *[1] * whole.ndim)).sum(0)
            of_parts["sum"] = numbers.double().sum(0)
        allowed = _allowed([numbers, whole])
        return {name for name, value in of_parts.items() if _is_close(value, whole, allowed)}


def _allowed(tensors: Sequence[torch.Tensor]) -> float:
    """Return by how much the second of two tensors may differ from the first for rounding."""
    dtype = tensors[-1].dtype if tensors[-1].is_floating_point() else torch.float64
    sizes = (float(tensor.double().abs().nan_to_num().max()) for tensor in tensors if tensor.numel())
    return float(torch.finfo(dtype).eps ** 0.5) * max(sizes, default=0.0)


def _is_close(one: torch.Tensor, other: torch.Tensor, allowed: float) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=allowed, equal_nan=True)


def _role(tables: Sequence[_Table], place: Place, wanted: str | None) -> SaidRole:
    """Return the wanted role if the numbers allow it, else the first that they allow."""
    wholes = [table.whole[place] for table in tables]
    if any(not _is_close(one, wholes[0], _allowed([one, wholes[0]])) for one in wholes[1:]):
        return "mixed"  # it depends on the order of samples
    found = set[Reduction].intersection(*(table.fitting(place) for table in tables))
    if {"max", "min"} <= found:
        return "sum" if wanted == "sum" and "sum" in found else "unknown"
    fitting = [name for name in get_args(Reduction) if name in found]
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
