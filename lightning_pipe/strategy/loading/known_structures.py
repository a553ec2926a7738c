"""Structures of batches that ranks have told each other: a number says as much as the structure.

Where Lightning alone moves batches to the device, no hook of the user changes them on the way. Then the structure that
a batch of nothing but tensors will have there is known when it is loaded: that of the last one which was loaded alike.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from lightning_pipe.capture.steps.batch import Structure
from lightning_pipe.errors import BatchError

UNKNOWN = -1
_MOST = 256
_MOST_BYTES = 64 * 2**20  # of all structures: objects in a batch are part of its structure, with their tensors
_MOST_UNDER_WAY = 3  # batches whose structures were told before they come; Lightning fetches one ahead at most


@dataclass(frozen=True)
class _Loaded:
    """A batch that was loaded (or what stands for it), its form, and the number that it is told to have."""

    batch: Any
    form: Hashable | None
    number: int


class KnownStructures:
    """The structures that were met, numbered alike on all ranks.

    Attributes:
        is_plain: whether batches come to the device as they are loaded, by no code of the user.
    """

    def __init__(self) -> None:
        self.is_plain = False
        self._numbers: dict[bytes, int] = {}
        self._known: list[Structure] = []
        self._as_loaded: dict[Hashable, int] = {}
        self._under_way: deque[_Loaded] = deque(maxlen=_MOST_UNDER_WAY)
        self._last = UNKNOWN

    def __getitem__(self, number: int) -> Structure:
        return self._known[number]

    def expected(self, form: Hashable | None) -> int:
        """Return the number of the structure that a batch of this form will have; `UNKNOWN` if that cannot be told."""
        return UNKNOWN if form is None else self._as_loaded.get(form, UNKNOWN)

    def was_last(self, number: int) -> bool:
        """Return whether the last batch that came had the structure of this number."""
        return UNKNOWN != number == self._last

    def loaded(self, batch: Any, form: Hashable | None, number: int) -> None:
        """Note what was told of a batch, or of what stands for it; on all ranks alike."""
        self._under_way.append(_Loaded(batch, form, number))

    def told_of(self, batch: Any) -> tuple[Hashable | None, int]:
        """Return, once, form and number of this very batch; no form and `UNKNOWN` for any other."""
        for place, found in enumerate(self._under_way):
            if found.batch is batch:
                del self._under_way[place]
                return found.form, found.number
        return None, UNKNOWN

    def number_of(self, packed_structure: bytes) -> int:
        """Return the number of a structure; `UNKNOWN` if it has none."""
        return self._numbers.get(packed_structure, UNKNOWN)

    def learn(self, packed_structure: bytes) -> int:
        """Give a structure the next number; on all ranks together."""
        if len(self._known) == _MOST or sum(map(len, self._numbers)) > _MOST_BYTES:
            self._numbers.clear()
            self._known.clear()
            self._as_loaded.clear()
            self._under_way.clear()
            self._last = UNKNOWN
        self._numbers[packed_structure] = len(self._known)
        self._known.append(pickle.loads(packed_structure))
        return len(self._known) - 1

    def came(self, form: Hashable | None, number: int) -> None:
        """Note that a batch has come to the device, and how it was loaded."""
        self._last = number
        if form is not None:
            self._as_loaded[form] = number


def packed(structure: Structure) -> bytes:
    """Return a structure as bytes, equal for equal ones.

    Raises:
        BatchError: if it holds what cannot be sent.
    """
    try:
        return pickle.dumps(structure)
    except Exception as error:
        raise BatchError(
            f"The batch holds something that cannot be sent to the other ranks: {error}. Return tensors, numbers, "
            "strings and containers of them from the collate function."
        ) from error
