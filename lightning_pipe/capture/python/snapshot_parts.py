"""Parts of a snapshot: the content of one container, tensor or generator at one moment, to compare and to put back."""

from __future__ import annotations

import itertools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lightning_pipe.capture.python.inner_states import equal_states
from lightning_pipe.capture.python.places import (
    ABSENT,
    SCALARS,
    Answers,
    Attributes,
    Place,
    ReadOnlyView,
    same,
)
from lightning_pipe.capture.torch_private import version_of
from lightning_pipe.errors import PipelineError

Keys: TypeAlias = AbstractSet[Any]


@dataclass(frozen=True)
class StateChange:
    """One place that is not what it was.

    Attributes:
        slot: the place; of a set, queue, array or generator, where that hangs.
        before, now: values; `ABSENT` where there is none.
        is_content: whether the slot has its object, with other content.
    """

    slot: Place
    before: Any
    now: Any
    is_content: bool = False

    def repeat(self) -> None:
        """Make the change once more, after what has changed was put back.

        Raises:
            PipelineError: if it is of what keeps no copy of its content.
        """
        container = self.slot.read()
        if not self.is_content:
            self.slot.write(self.now)
        elif isinstance(container, (list, deque, set)):
            container.clear()
            (container.update if isinstance(container, set) else container.extend)(self.now)
        elif not isinstance(container, dict):  # of one its order
            raise PipelineError(
                f"The backward changes the content of {self.slot.name}, and the step changes Python state, too. Keep "
                "numbers or lists of numbers there, or change it in a hook of the module or of a callback."
            )

    def __str__(self) -> str:
        if self.is_content:
            return f"the content of {self.slot.name} has changed"
        return f"{self.slot.name} was {_short(self.before)} and is {_short(self.now)} now"


def _short(value: Any) -> str:
    if isinstance(value, SCALARS) or value is ABSENT:
        text = repr(value)
        return text if len(text) < 60 else f"{text[:57]}..."
    return f"a {type(value).__name__}"


class DictContent:
    """Entries of a dict (or what looks like one) at one moment; those in `hidden` are not looked at.

    Args:
        container: the dict.
        slot: where what it belongs to is.
        hidden: keys that are not looked at.
        kind: of the step from that to an entry.
    """

    def __init__(self, container: Any, slot: Place, *, hidden: Keys = frozenset(), kind: str = "item") -> None:
        self._container, self._at, self._hidden, self._kind = container, slot, hidden, kind
        self.content = self._now()

    def _now(self) -> dict[Any, Any]:
        container, hidden = self._container, self._hidden
        if isinstance(container, Attributes):
            container = vars(container.owner)
        elif isinstance(container, ReadOnlyView):
            return container.now()
        if isinstance(container, Answers) or not isinstance(container, dict):
            return {key: container[key] for key in container if key not in hidden}
        # a subclass may do anything where it is asked itself: make, move, forget entries
        items = (OrderedDict if isinstance(container, OrderedDict) else dict).items(container)
        return dict(items) if not hidden else {key: value for key, value in items if key not in hidden}

    def slots(self) -> Iterator[Place]:
        """Yield the places of what is inside, which have content of their own."""
        for key in self.content:
            yield self._slot(key)

    def _slot(self, key: Any) -> Place:
        return self._at.inside(self._container, key, self._kind)

    @property
    def empty(self) -> dict[Any, Any] | None:
        """Return the dict if it was empty, so that it is as it was while it is false; None if that does not tell."""
        container = self._container
        if isinstance(container, Attributes) and type(container.owner) is OrderedDict:
            container = vars(container.owner)  # which a table of hooks has, and nobody replaces
        is_plain = type(container) in (dict, OrderedDict) and not self._hidden
        return container if is_plain and not self.content else None

    def is_same(self) -> bool:
        """Return whether the content is what it was."""
        content, now = self.content, self._now()
        if len(now) != len(content):
            return False
        for (a, x), (b, y) in zip(now.items(), content.items(), strict=True):
            if not (_is_same_key(a, b) and (x is y or same(x, y))):
                return False
        return True

    def changes(self) -> Iterator[StateChange]:
        """Yield what is no longer what it was."""
        now = self._now()
        for key in {**self.content, **now}:
            before, after = self.content.get(key, ABSENT), now.get(key, ABSENT)
            if not same(before, after):
                yield StateChange(self._slot(key), before, after)
        if now.keys() == self.content.keys() and not _are_in_order(now, self.content):
            yield StateChange(self._at, self._container, self._container, is_content=True)

    def restore(self) -> None:
        """Put the content back, where that is possible."""
        if isinstance(self._container, types.MappingProxyType):
            return
        now = self._now()
        for key in now.keys() - self.content.keys():
            del self._container[key]
        for key, value in self.content.items():
            if now.get(key, ABSENT) is not value:
                self._container[key] = value
        if isinstance(self._container, (dict, Attributes)) and not _are_in_order(self._now(), self.content):
            for key, value in self.content.items():
                del self._container[key]
                self._container[key] = value


def _is_same_key(one: Any, two: Any) -> bool:
    return one is two or (not isinstance(one, torch.Tensor) and bool(one == two))  # of tensors `==` compares items


def _are_in_order(one: Any, two: Any) -> bool:
    return len(one) == len(two) and all(map(_is_same_key, one, two))


class ListContent:
    """Items of a list, queue or set at one moment; those at indices in `hidden` are not looked at."""

    def __init__(self, container: Any, slot: Place, *, hidden: Keys = frozenset()) -> None:
        self._container, self._slot, self._hidden = container, slot, hidden
        self.content = self._now()

    def _now(self) -> list[Any]:
        # a subclass may do anything where it is asked itself; one of ours notes who looks
        return list(list.__iter__(self._container) if isinstance(self._container, list) else self._container)

    def slots(self) -> Iterator[Place]:
        """Yield the places of what is inside, which have content of their own."""
        for index, item in enumerate(self.content):
            container = self._container if isinstance(self._container, list) else dict(enumerate(self.content))
            if type(item) not in SCALARS:
                yield self._slot.inside(container, index, "item")

    def is_same(self) -> bool:
        """Return whether the content is what it was."""
        now = self._now()
        if self._hidden:
            return len(now) == len(self.content) and next(self._different(), None) is None
        return len(now) == len(self.content) and all(map(same, now, self.content))

    def _different(self) -> Iterator[int]:
        for index, (before, now) in enumerate(zip(self.content, self._now(), strict=True)):
            if index not in self._hidden and not same(before, now):
                yield index

    def changes(self) -> Iterator[StateChange]:
        """Yield what is no longer what it was."""
        if self.is_same():
            return
        now = self._now()
        if isinstance(self._container, list) and len(now) == len(self.content):
            for index in self._different():
                slot = self._slot.inside(self._container, index, "item")
                yield StateChange(slot, self.content[index], now[index])
        else:
            yield StateChange(self._slot, self.content, now, is_content=True)

    def restore(self) -> None:
        """Put the content back, where that is possible."""
        pairs = itertools.zip_longest(self._now(), self.content, fillvalue=ABSENT)
        if all(one is two for one, two in pairs):
            return
        self._container.clear()
        (self._container.update if isinstance(self._container, set) else self._container.extend)(self.content)


class TensorContent:
    """A tensor, which counts by its version.

    Args:
        slot: where it is.
        tensor: the tensor.
        copied: whether its content can be put back.
    """

    def __init__(self, slot: Place, tensor: torch.Tensor, *, copied: bool) -> None:
        self._slot, self._tensor, self._version = slot, tensor, _version(tensor)
        self._content = tensor.detach().clone() if copied else None

    def slots(self) -> Iterator[Place]:
        """Yield the places of what is inside, which have content of their own."""
        return iter(())

    def is_same(self) -> bool:
        """Return whether the content is what it was."""
        return bool(_version(self._tensor) == self._version)

    def changes(self) -> Iterator[StateChange]:
        """Yield what is no longer what it was."""
        yield StateChange(self._slot, self._tensor, self._tensor, is_content=True)

    def restore(self) -> None:
        """Put the content back, where that is possible."""
        if self._content is not None and not self.is_same():
            with torch.no_grad():
                self._tensor.copy_(self._content)
            self._version = _version(self._tensor)


class InnerContent:
    """Something whose state is read and set by functions: a generator of random numbers, an array."""

    def __init__(self, slot: Place, read: Callable[[], Any], write: Callable[[Any], Any] | None) -> None:
        self._slot, self._read, self._write = slot, read, write
        self._state = read()

    def slots(self) -> Iterator[Place]:
        """Yield the places of what is inside, which have content of their own."""
        return iter(())

    def is_same(self) -> bool:
        """Return whether the content is what it was."""
        return equal_states(self._read(), self._state)

    def changes(self) -> Iterator[StateChange]:
        """Yield what is no longer what it was."""
        if not self.is_same():
            yield StateChange(self._slot, self._slot.read(), self._slot.read(), is_content=True)

    def restore(self) -> None:
        """Put the content back, where that is possible."""
        if self._write is not None and not self.is_same():
            self._write(self._state)


SnapshotPart: TypeAlias = DictContent | ListContent | TensorContent | InnerContent


def _version(tensor: torch.Tensor) -> Any:
    return () if tensor.is_inference() else (version_of(tensor), tensor.requires_grad)
