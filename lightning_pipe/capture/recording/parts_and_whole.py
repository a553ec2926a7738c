"""What parts of some samples have given beside what all of them give: how the ones make the other, by numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias, TypeVar, get_args

import torch

Key = TypeVar("Key")
Reduction: TypeAlias = Literal["mean", "sum", "max", "min", "first", "last"]
FoundRole: TypeAlias = Reduction | Literal["mixed", "unknown"]
ENDS: tuple[Reduction, ...] = ("first", "last")  # of single samples, at an end of the batch


@dataclass(frozen=True)
class PartsAndWhole(Generic[Key]):
    """Tensors of parts of some samples, and of all of them in the same order, by name.

    Attributes:
        parts: those of each part.
        counts: numbers of samples of these.
        whole: those of all.
    """

    parts: tuple[Mapping[Key, torch.Tensor], ...]
    counts: tuple[int, ...]
    whole: Mapping[Key, torch.Tensor]

    def turned(self, whole: Mapping[Key, torch.Tensor]) -> PartsAndWhole[Key]:
        """Return the same with the parts in the opposite order, and what all samples have given in that order.

        A sample that is picked by what it is, and not by where it lies, is then in another part.
        """
        return PartsAndWhole(self.parts[::-1], self.counts[::-1], whole)

    def has(self, key: Key) -> bool:
        """Return whether all have given this tensor."""
        return all(key in row for row in (*self.parts, self.whole))

    def has_samples(self, key: Key) -> bool:
        """Return whether a tensor has another shape in the parts than in the whole."""
        return any(part[key].shape != self.whole[key].shape for part in self.parts)

    def sample_dim(self, key: Key) -> int | None:
        """Return the dimension along which the parts are as long as the whole; None if there is none."""
        whole, parts = self.whole[key], [part[key] for part in self.parts]
        if any(part.ndim != whole.ndim for part in parts):
            return None
        for dim in range(whole.ndim):
            rest = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in (whole, *parts)}
            if len(rest) == 1 and sum(part.shape[dim] for part in parts) == whole.shape[dim]:
                return dim
        return None

    def joined_along(self, key: Key) -> int | None:
        """Return the dimension along which the parts make the whole; None if there is none."""
        if (dim := self.sample_dim(key)) is None:
            return None
        joined, whole = torch.cat([part[key] for part in self.parts], dim), self.whole[key]
        return dim if _is_close(joined, whole, _allowed([joined, whole])) else None

    def is_whole(self, key: Key) -> bool:
        """Return whether every part has what the whole has, as far as it was computed in single precision."""
        whole = self.whole[key].float()
        return all(_is_close(part[key], whole, _allowed([part[key], whole])) for part in self.parts)

    def reductions(self, key: Key) -> set[Reduction]:
        """Return the reductions of the parts that give the whole."""
        whole, numbers = self.whole[key], torch.stack([part[key] for part in self.parts])
        if not bool(numbers.isfinite().all() & whole.isfinite().all()):
            return {*get_args(Reduction)}  # nothing is known
        found: dict[Reduction, torch.Tensor] = {"max": numbers.amax(0), "min": numbers.amin(0)}
        if whole.dtype != torch.bool:
            shares = torch.tensor(self.counts, dtype=torch.float64) / sum(self.counts)
            found["mean"] = (numbers.double() * shares.reshape(-1, *[1] * whole.ndim)).sum(0)
            found["sum"] = numbers.double().sum(0)
        found |= {"first": numbers[0], "last": numbers[-1]}
        allowed = _allowed([numbers, whole])
        return {name for name, value in found.items() if _is_close(value, whole, allowed)}


def found_role(trials: Sequence[PartsAndWhole[Key]], key: Key, *, wanted: str | None) -> FoundRole:
    """Return how a tensor without samples is combined, by trials with the same samples in several orders.

    Args:
        trials: all of which have it.
        key: its name.
        wanted: the role that it gets if the numbers allow it; else it gets the first that they allow.

    Returns:
        "mixed" if they allow none, "unknown" if the parts have what the whole has.
    """
    trials = [trial for trial in trials if not trial.has_samples(key)]  # whose parts have fewer than are picked
    wholes = [trial.whole[key] for trial in trials]
    found = set[Reduction].intersection(*(trial.reductions(key) for trial in trials))
    if any(not _is_close(one, wholes[0], _allowed([one, wholes[0]])) for one in wholes[1:]):
        return next((end for end in ENDS if end in found), "mixed")  # it depends on the order of samples
    found -= {*ENDS}
    if {"max", "min"} <= found:
        return "sum" if wanted == "sum" and "sum" in found else "unknown"
    fitting = [name for name in get_args(Reduction) if name in found]
    return next((name for name in fitting if name == wanted), fitting[0] if fitting else "mixed")


def uneven_parts(rows: torch.Tensor) -> list[tuple[torch.Tensor, tuple[int, int]]]:
    """Return sorted samples from both sides, each with a small part of the first ones and one of the others.

    What is picked by what it is, from an end of what is sorted, is not in the first part from one of the sides.
    """
    few = max(1, len(rows) // 4)
    return [(order, (few, len(rows) - few)) for order in (rows, rows.flip(0))]


def unlike_order(rows: torch.Tensor) -> torch.Tensor:
    """Return samples in another order: every second one, from behind; neighbours are in different halves."""
    return torch.cat([rows[1::2], rows[::2]]).flip(0)


def _allowed(tensors: Sequence[torch.Tensor]) -> float:
    """Return by how much tensors may differ for rounding."""
    dtype = tensors[-1].dtype if tensors[-1].is_floating_point() else torch.float64
    sizes = (float(tensor.double().abs().nan_to_num().max()) for tensor in tensors if tensor.numel())
    eps = float(torch.finfo(dtype).eps)
    return max(math.sqrt(eps) * max(sizes, default=0.0), 4 * eps)  # what cancels leaves digits of what made it


def _is_close(one: torch.Tensor, other: torch.Tensor, allowed: float) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=0.0, atol=allowed, equal_nan=True)
