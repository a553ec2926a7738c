"""Reads and writes of the attributes of some objects, noticed by methods that their classes have for a while.

Objects keep their exact class, so that `type(x)`, `isinstance`, `vars(x)`, copies and pickles are as they always are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

Read: TypeAlias = Callable[[Any, str], Any]
ReadListener: TypeAlias = Callable[[Read, Any, str], Any]  # reads the attribute itself, two frames inside the reader
WriteListener: TypeAlias = Callable[[str], None]

_METHODS = ("__getattribute__", "__setattr__")
_MISSING = object()


@dataclass(frozen=True)
class _Listener:
    owner: Any  # kept alive, as it is known by its identity
    reads: ReadListener
    writes: WriteListener | None


class AttributeAccess:
    """Objects whose attributes are listened to until the end of `listening`."""

    def __init__(self) -> None:
        self._listeners: dict[int, _Listener] = {}
        self._replaced: dict[type, dict[str, Any]] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Give all classes their own methods back in the end."""
        try:
            yield
        finally:
            for cls, methods in reversed(self._replaced.items()):
                for name, method in methods.items():
                    if method is _MISSING:
                        type.__delattr__(cls, name)
                    else:
                        type.__setattr__(cls, name, method)
            self._replaced.clear()
            self._listeners.clear()

    def is_known(self, owner: Any) -> bool:
        """Return whether somebody listens to an object."""
        return id(owner) in self._listeners

    def listen(self, owner: Any, reads: ReadListener, writes: WriteListener | None = None) -> bool:
        """Call listeners whenever an attribute of an object is read or written; return whether that is possible."""
        cls = type(owner)
        if cls not in self._replaced:
            own = {name: vars(cls).get(name, _MISSING) for name in _METHODS}
            noticing = self._methods(cls)
            try:
                for name in _METHODS:
                    type.__setattr__(cls, name, noticing[name])
            except TypeError:  # a class written in C
                return False
            self._replaced[cls] = own
        self._listeners[id(owner)] = _Listener(owner, reads, writes)
        return True

    def _methods(self, cls: type) -> dict[str, Any]:
        listeners, plain = self._listeners, cast(Any, cls)
        read, write = plain.__getattribute__, plain.__setattr__

        def __getattribute__(self: Any, name: str) -> Any:
            # a subclass has methods of its own, and is listened to there
            listener = listeners.get(id(self)) if type(self) is cls else None
            return read(self, name) if listener is None else listener.reads(read, self, name)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            listener = listeners.get(id(self)) if type(self) is cls else None
            if listener is not None and listener.writes is not None:
                listener.writes(name)
            write(self, name, value)

        return {"__getattribute__": __getattribute__, "__setattr__": __setattr__}
