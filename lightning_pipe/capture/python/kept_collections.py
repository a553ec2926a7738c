"""Lists and dicts that tell whether a step only adds to them, or looks at what earlier steps have left in them.

While a step is traced they take the place of the module's own. A step that appends its loss to `self.losses` does not
depend on what is in there; one that takes their mean does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator
from typing import Any

from lightning_pipe.capture.python.places import Place


class KeptList(list[Any]):
    """A list that notes whether somebody looks at what was in it before, and whether it was cleared."""

    def __init__(self, original: list[Any]) -> None:
        super().__init__(original)
        self.original = original
        self.is_read = self.is_cleared = False

    @property
    def added(self) -> list[Any]:
        """Return what is in it besides what was there; all of it if it was cleared."""
        items = list(iter_plainly(self))
        return items if self.is_cleared else items[len(self.original) :]

    @property
    def is_changed(self) -> bool:
        """Return whether it holds other items than it did."""
        items = list(iter_plainly(self))
        return len(items) != len(self.original) or any(a is not b for a, b in zip(items, self.original, strict=True))

    @property
    def only_grew(self) -> bool:
        """Return whether what was in it is still its beginning."""
        items = list(iter_plainly(self))
        return len(items) >= len(self.original) and all(a is b for a, b in zip(items, self.original, strict=False))

    def clear(self) -> None:
        """Remove everything."""
        self.is_cleared = True
        list.clear(self)

    def note_whole(self) -> None:
        """Note that somebody looks at all of it."""
        self.is_read |= not self.is_cleared

    def __radd__(self, other: list[Any]) -> list[Any]:
        return other + list(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.note_whole()
        return list, (list(iter_plainly(self)),)

    __class__ = property(lambda self: list)


class KeptDict(dict[Any, Any]):
    """A dict that notes whether somebody looks at what was in it before; entries of the step's own may be read.

    Attributes:
        filled: keys of entries of the step's own, when somebody looked at all: it must not have had others.
    """

    def __init__(self, original: dict[Any, Any]) -> None:
        super().__init__(original)
        self.original = original
        self.is_read = self.is_cleared = False
        self.written: dict[Any, None] = {}
        self.filled: frozenset[Any] | None = None

    @property
    def is_changed(self) -> bool:
        """Return whether it holds other entries than it did."""
        now = dict(dict.items(self))
        return self.is_cleared or now.keys() != self.original.keys() or any(now[k] is not self.original[k] for k in now)

    @property
    def only_grew(self) -> bool:
        """Return whether nothing was removed."""
        return not self.is_cleared and all(key in dict.keys(self) for key in self.original)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.written.setdefault(key)
        dict.__setitem__(self, key, value)

    def update(self, *others: Any, **items: Any) -> None:
        """Set entries."""
        for key, value in dict(*others, **items).items():
            self[key] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def clear(self) -> None:
        """Remove everything."""
        self.is_cleared = True
        dict.clear(self)

    def __getitem__(self, key: Any) -> Any:
        self.is_read |= not self.is_cleared and key not in self.written
        return dict.__getitem__(self, key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return an entry, or the default."""
        self.is_read |= not self.is_cleared and key not in self.written
        return dict.get(self, key, default)

    def note_whole(self) -> None:
        """Note that somebody looks at all of it."""
        if self.is_cleared or self.is_read or not self.written:
            self.is_read |= not self.is_cleared
        elif all(key in self.written for key in self.original):
            self.filled = frozenset(self.written) if self.filled is None else self.filled
        else:
            self.is_read = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.note_whole()
        return dict, (dict(dict.items(self)),)

    __class__ = property(lambda self: dict)


def iter_plainly(collection: list[Any]) -> Iterator[Any]:
    """Iterate a list without its noticing."""
    return list.__iter__(collection)


def _reading(cls: type, name: str) -> Any:
    original = getattr(cls, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.note_whole()
        return original(self, *args, **kwargs)

    return method


_LIST_READS = (
    "__getitem__ __iter__ __len__ __contains__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __mul__ __rmul__ "
    "__imul__ __reversed__ __repr__ __delitem__ __setitem__ index count pop remove copy sort reverse insert"
).split()
_DICT_READS = (
    "__iter__ __len__ __contains__ __eq__ __ne__ __or__ __ror__ __reversed__ __repr__ __delitem__ keys values items "
    "pop popitem setdefault copy"
).split()
for _class, _base, _names in ((KeptList, list, _LIST_READS), (KeptDict, dict, _DICT_READS)):
    for _name in _names:
        setattr(_class, _name, _reading(_base, _name))


@contextlib.contextmanager
def kept_collections(
    slots: Iterable[Place], *, shared: Container[int] = ()
) -> Iterator[list[tuple[Place, KeptList | KeptDict]]]:
    """Put such lists and dicts into the places of plain ones for a while; the yielded list has them.

    Args:
        slots: the places.
        shared: identities of what other places have, too, and stays: it must be one object in all of them.
    """
    replaced: list[tuple[Place, KeptList | KeptDict]] = []
    for slot in slots:
        value = slot.read()
        if type(value) in (list, dict) and id(value) not in shared:
            kept = KeptList(value) if type(value) is list else KeptDict(value)
            slot.write(kept)
            replaced.append((slot, kept))
    try:
        yield replaced
    finally:
        for slot, kept in replaced:
            if slot.read() is kept:
                slot.write(kept.original)
