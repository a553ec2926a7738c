"""Results of a function of one object, kept as long as the object is there, or until they are forgotten."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Owner = TypeVar("Owner")
Result = TypeVar("Result")


class OncePerObject(Generic[Owner, Result]):
    """Compute a function once for every object, which is known by identity: comparing two graphs takes longer.

    Args:
        function: of an object that does not change; a result that refers to its object keeps both until it is
            forgotten.
    """

    def __init__(self, function: Callable[[Owner], Result]) -> None:
        self._function = function
        self._known: dict[int, tuple[weakref.ref[Any], Result]] = {}

    def __call__(self, owner: Owner) -> Result:
        """Return the result for an object."""
        known = self._known.get(id(owner))
        if known is not None and known[0]() is owner:
            return known[1]
        result, number = self._function(owner), id(owner)
        self._known[number] = (weakref.ref(owner, lambda _: self._known.pop(number, None)), result)
        return result

    def forget(self, owner: Owner) -> None:
        """Drop the result for an object."""
        self._known.pop(id(owner), None)
