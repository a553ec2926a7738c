"""Batch structure: tensor leaves, and everything else.

Any nesting that Lightning moves to a device is understood (dict, list, tuple, named tuple, dataclass, `UserDict`).
Tensors are leaves; other objects are part of the structure, and constants of the graph that is captured for it.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.nn.utils.rnn import PackedSequence

from lightning_pipe.capture.steps.trees import branches, rebuilt
from lightning_pipe.errors import BatchError


@dataclass(frozen=True)
class LeafSlot:
    """Stand for the `index`-th tensor of a batch."""

    index: int


@dataclass(frozen=True)
class Leaf:
    """What is known of a tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Structure:
    """A batch without its tensors' data.

    Attributes:
        template: the batch with a `LeafSlot` for each tensor.
        leaves: shape and dtype of each tensor.
    """

    template: Any
    leaves: tuple[Leaf, ...]

    @cached_property
    def form(self) -> tuple[Any, ...] | None:
        """Describe it by its collections and tensors, so that equal forms are equal; None if it holds more."""
        others: list[Any] = []
        form = _described(self.template, lambda leaf: others.append(leaf) if type(leaf) is not LeafSlot else leaf)
        return None if others else (form, self.leaves)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent, which is the same for equal structures."""
        return {"template": self.template, "leaves": self.leaves}

    def fill(self, tensors: Sequence[Any]) -> Any:
        """Return a batch like the template with these tensors."""
        return apply_to_collection(self.template, LeafSlot, lambda slot: tensors[slot.index])

    def fill_part(self, tensors: Sequence[Any], batch_dim: int) -> Any:
        """Return a batch of the first samples, as many as the tensors have, with lists of as many items."""
        along = [len(leaf.shape) > batch_dim for leaf in self.leaves]
        counts = [t.shape[batch_dim] for t, is_cut in zip(tensors, along, strict=True) if is_cut]
        return Structure(self.template_of(counts[0], batch_dim) if counts else self.template, self.leaves).fill(tensors)

    def template_of(self, count: int, batch_dim: int) -> Any:
        """Return the template with lists of an item per sample cut to the first samples."""
        totals = {leaf.shape[batch_dim] for leaf in self.leaves if len(leaf.shape) > batch_dim}
        return with_rows(self.template, totals.pop(), range(count)) if len(totals) == 1 else self.template  # not cut

    def map(self, make: Callable[[Leaf], torch.Tensor]) -> Any:
        """Return a batch like the template with tensors made from what is known of them."""
        return self.fill([make(leaf) for leaf in self.leaves])

    def cut(self, batch_dim: int = 0) -> tuple[bool, ...]:
        """Return for each leaf whether it lies along the samples; 0-dimensional ones do not.

        Raises:
            BatchError: if the leaves disagree about the number of samples.
        """
        self.samples(batch_dim)
        return tuple(len(leaf.shape) > batch_dim for leaf in self.leaves)

    def samples(self, batch_dim: int = 0) -> int:
        """Return the number of samples: the size of every leaf along `batch_dim`.

        Raises:
            BatchError: if there is no leaf with that dimension, or if the leaves disagree.
        """
        sizes = {i: leaf.shape[batch_dim] for i, leaf in enumerate(self.leaves) if len(leaf.shape) > batch_dim}
        if not sizes:
            raise BatchError(
                f"The batch has no tensor with a dimension {batch_dim} to cut into micro-batches (found "
                f"{len(self.leaves)} tensors in {type(self.template).__name__}; dicts, lists, tuples and dataclasses "
                "are looked into). Return tensors with samples along one dimension, and name it with batch_dim if it "
                "is not the first; or set microbatches=1 and give every stage one rank, for batches as they are."
            )
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"tensor {i} has {n}" for i, n in sizes.items())
            raise BatchError(
                f"The tensors of the batch disagree about the number of samples along dimension {batch_dim}: {found}. "
                "They cannot be cut into micro-batches together; set microbatches=1 and give every stage one rank, or "
                "let the collate function return tensors with one row per sample."
            )
        return next(iter(sizes.values()))


def flatten(batch: Any) -> tuple[list[torch.Tensor], Structure]:
    """Split a batch into its tensors and its structure.

    Raises:
        TypeError: if it holds what is no plain tensor and cannot be sent as one: packed, nested or sparse.
    """
    tensors: list[torch.Tensor] = []

    def take(leaf: torch.Tensor | PackedSequence) -> LeafSlot:
        if isinstance(leaf, PackedSequence):
            raise TypeError(
                "The batch holds a PackedSequence, whose samples lie in no rows of their own. Let the collate function "
                "return padded tensors and their lengths, and call pack_padded_sequence in the step."
            )
        if not is_dense(leaf):
            raise TypeError(
                f"The batch holds a tensor of the layout {leaf.layout}, whose samples lie in no rows of their own. Let "
                "the collate function return plain tensors (values with offsets, or with indices), and make a nested "
                "or sparse tensor of them in the step."
            )
        tensors.append(leaf)
        return LeafSlot(len(tensors) - 1)

    template = apply_to_collection(batch, (torch.Tensor, PackedSequence), take)
    return tensors, Structure(template, tuple(Leaf(tuple(t.shape), t.dtype) for t in tensors))


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is plain memory with shape and strides: not sparse, nested or of a library's layout."""
    return tensor.layout == torch.strided and not tensor.is_nested


def with_rows(template: Any, total: int, rows: range) -> Any:
    """Return a template whose lists with an item per sample, but no tensors, have those of some samples.

    Rows behind the last are the first ones again: a trial may have more samples than the batch that it is made of.
    """
    if len(rows) == total or isinstance(template, LeafSlot) or (inside := branches(template)) is None:
        return template
    if type(template) in (list, tuple) and len(template) == total and not _has_tensors(template):
        return type(template)(template[row % total] for row in rows)
    return rebuilt(template, {key: with_rows(item, total, rows) for key, item in inside.items()})


def _has_tensors(template: Any) -> bool:
    return isinstance(template, LeafSlot) or any(map(_has_tensors, (branches(template) or {}).values()))


def with_numbers(template: Any, make: Callable[[int, Any], Any]) -> Any:
    """Return a template with other numbers: `make(index, number)` for every `int` and `float`, in their order."""
    count = itertools.count()
    return apply_to_collection(
        template,
        (LeafSlot, int, float, bytes),
        lambda leaf: make(next(count), leaf) if type(leaf) in (int, float) else leaf,
    )


def numbers_in(template: Any) -> tuple[int | float, ...]:
    """List the numbers of a template."""
    found: list[int | float] = []
    with_numbers(template, lambda _, number: found.append(number))
    return tuple(found)


def outline(template: Any) -> Any:
    """Describe the structure of a template: its collections, and the types of what they hold, but no content."""
    return _described(template, lambda leaf: type(leaf).__qualname__)


def same_besides_tensors(one: Any, two: Any) -> bool:
    """Return whether two templates hold the same at the same places: equal numbers and texts, and one object."""
    scalars = (LeafSlot, type(None), bool, int, float, complex, str, bytes)

    def describe(leaf: Any) -> Any:
        return (type(leaf), leaf) if isinstance(leaf, scalars) else id(leaf)

    return bool(_described(one, describe) == _described(two, describe))


def contents(template: Any) -> Any:
    """Describe what a template holds besides tensors, texts and numbers, so that equal content is equal."""
    return _described(template, lambda leaf: None if type(leaf) in (LeafSlot, int, float) else _content(leaf))


def _described(value: Any, describe: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return (type(value).__qualname__, *((key, _described(item, describe)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__qualname__, *(_described(item, describe) for item in value))
    if is_dataclass(value) and not isinstance(value, (LeafSlot, type)):
        parts = ((f.name, _described(getattr(value, f.name, None), describe)) for f in fields(value))
        return (type(value).__qualname__, *parts)
    return describe(value)


def _content(leaf: Any) -> Any:
    if isinstance(leaf, str):
        return None
    if leaf is None or isinstance(leaf, (bool, int, float, complex, bytes)):
        return (type(leaf), leaf)
    try:
        return hashlib.sha256(pickle.dumps(leaf)).digest()
    except Exception:  # whatever an object's own way to be pickled raises; such a batch has one rank
        return id(leaf)
