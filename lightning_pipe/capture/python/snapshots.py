"""Snapshots of Python state: what a module, its helpers and the globals of its code hold, to compare and to put back.

A snapshot begins at *slots* (an attribute, a global, a default argument) and goes down through lists, dicts, sets,
queues, tuples, instances of classes, the user's classes, functions with their closures, defaults and attributes,
partial functions, generators, weak references and generators of random numbers. Of each it keeps what was in it. It
ends at what has no Python state of its own or is somebody else's: modules of the tree and their classes (their
attributes are slots), parameters and buffers, the trainer, data sets, loggers, most objects of the standard library.
Tensors count by identity and version, NumPy arrays by content.

    Snapshot(slots).changes()        where something is no longer what it was
    Snapshot(slots).restore()        put it back
"""

from __future__ import annotations

import enum
import itertools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torchmetrics
from torch import nn

from lightning_pipe.capture.python.inner_states import equal_states, inner_state
from lightning_pipe.capture.python.places import (
    ABSENT,
    HOLDERS,
    SCALARS,
    Cells,
    ClassAttributes,
    Locals,
    Place,
    SlotAttributes,
    asked_of,
    classes_of,
    defaults_of,
    held_by,
    identity,
    same,
)
from lightning_pipe.capture.python.users_code import is_library, is_users
from lightning_pipe.capture.torch_private import version_of
from lightning_pipe.lightning_names import pl

Keys: TypeAlias = AbstractSet[Any]
_COPIED_ELEMENTS = 2**20  # of a tensor whose content can be put back
_MOST_OBJECTS = 100_000  # of one snapshot; what lies beyond (a tokenizer's vocabulary, a graph) counts by identity
_FOREIGN_ROOTS = frozenset(
    {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "lightning_pipe"}
)
_COLLECTIONS = (dict, list, deque, set)  # and classes made from them
_FOREIGN_TYPES = (
    pl.Trainer,
    pl.LightningDataModule,
    torchmetrics.Metric,
    torchmetrics.MetricCollection,
    torch.utils.data.Dataset,
    torch.utils.data.DataLoader,
    types.ModuleType,
)
_OURS_OF_THE_LIBRARY = frozenset(
    "_thread argparse collections configparser dataclasses decimal enum fractions functools itertools multiprocessing "
    "queue random threading types weakref".split()
)


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

    def __str__(self) -> str:
        if self.is_content:
            return f"the content of {self.slot.name} has changed"
        return f"{self.slot.name} was {_short(self.before)} and is {_short(self.now)} now"


def _short(value: Any) -> str:
    if isinstance(value, SCALARS) or value is ABSENT:
        text = repr(value)
        return text if len(text) < 60 else f"{text[:57]}..."
    return f"a {type(value).__name__}"


class _Entries:
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
        if type(self._container) is dict and not self._hidden:
            return dict(self._container)
        return {key: self._container[key] for key in self._container if not self._hidden or key not in self._hidden}

    def slots(self) -> Iterator[Place]:
        for key in self.content:
            yield self._slot(key)

    def _slot(self, key: Any) -> Place:
        return self._at.inside(self._container, key, self._kind)

    @property
    def empty(self) -> dict[Any, Any] | None:
        """Return the dict if it was empty, so that it is as it was while it is false; None if that does not tell."""
        is_plain = type(self._container) in (dict, OrderedDict) and not self._hidden
        return self._container if is_plain and not self.content else None

    def is_same(self) -> bool:
        content, container = self.content, self._container
        if not self._hidden and len(container) != len(content):
            return False
        now = self._now()
        if len(now) != len(content):
            return False
        return all(a == b and same(x, y) for (a, x), (b, y) in zip(now.items(), content.items(), strict=True))

    def changes(self) -> Iterator[StateChange]:
        now = self._now()
        for key in {**self.content, **now}:
            before, after = self.content.get(key, ABSENT), now.get(key, ABSENT)
            if not same(before, after):
                yield StateChange(self._slot(key), before, after)
        if now.keys() == self.content.keys() and [*now] != [*self.content]:  # another order
            yield StateChange(self._at, self._container, self._container, is_content=True)

    def restore(self) -> None:
        if isinstance(self._container, types.MappingProxyType):
            return
        for key in [key for key in self._now() if key not in self.content]:
            del self._container[key]
        for key, value in self.content.items():
            if key not in self._container or self._container[key] is not value:
                self._container[key] = value
        if isinstance(self._container, dict) and [*self._now()] != [*self.content]:
            for key, value in self.content.items():
                del self._container[key]
                self._container[key] = value


class _Items:
    """Items of a list, queue or set at one moment; those at indices in `hidden` are not looked at."""

    def __init__(self, container: Any, slot: Place, *, hidden: Keys = frozenset()) -> None:
        self._container, self._slot, self._hidden = container, slot, hidden
        self.content = list(container)

    def slots(self) -> Iterator[Place]:
        for index, item in enumerate(self.content):
            container = self._container if isinstance(self._container, list) else dict(enumerate(self.content))
            if type(item) not in SCALARS:
                yield self._slot.inside(container, index, "item")

    def is_same(self) -> bool:
        if self._hidden:
            return len(self._container) == len(self.content) and next(self._different(), None) is None
        return len(self._container) == len(self.content) and all(map(same, self._container, self.content))

    def _different(self) -> Iterator[int]:
        for index, (before, now) in enumerate(zip(self.content, self._container, strict=True)):
            if index not in self._hidden and not same(before, now):
                yield index

    def changes(self) -> Iterator[StateChange]:
        if self.is_same():
            return
        now = list(self._container)
        if isinstance(self._container, list) and len(now) == len(self.content):
            for index in self._different():
                slot = self._slot.inside(self._container, index, "item")
                yield StateChange(slot, self.content[index], now[index])
        else:
            yield StateChange(self._slot, self.content, now, is_content=True)

    def restore(self) -> None:
        pairs = itertools.zip_longest(self._container, self.content, fillvalue=ABSENT)
        if all(one is two for one, two in pairs):
            return
        self._container.clear()
        (self._container.update if isinstance(self._container, set) else self._container.extend)(self.content)


class _Written:
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
        return iter(())

    def is_same(self) -> bool:
        return bool(_version(self._tensor) == self._version)

    def changes(self) -> Iterator[StateChange]:
        yield StateChange(self._slot, self._tensor, self._tensor, is_content=True)

    def restore(self) -> None:
        if self._content is not None and not self.is_same():
            with torch.no_grad():
                self._tensor.copy_(self._content)
            self._version = _version(self._tensor)


class _Stated:
    """Something whose state is read and set by functions: a generator of random numbers, an array."""

    def __init__(self, slot: Place, read: Callable[[], Any], write: Callable[[Any], Any] | None) -> None:
        self._slot, self._read, self._write = slot, read, write
        self._state = read()

    def slots(self) -> Iterator[Place]:
        return iter(())

    def is_same(self) -> bool:
        return equal_states(self._read(), self._state)

    def changes(self) -> Iterator[StateChange]:
        if not self.is_same():
            yield StateChange(self._slot, self._slot.read(), self._slot.read(), is_content=True)

    def restore(self) -> None:
        if self._write is not None and not self.is_same():
            self._write(self._state)


_Part: TypeAlias = _Entries | _Items | _Written | _Stated


class Snapshot:
    """The Python state behind some slots at one moment.

    Args:
        slots: where it begins.
        tree: module whose sub-modules, parameters and buffers are not entered.
        ignored: places inside that are not looked at.
        copies: whether the content of tensors can be put back, too.
    """

    def __init__(
        self, slots: Iterable[Place], *, tree: nn.Module, ignored: Iterable[Place] = (), copies: bool = False
    ) -> None:
        self._copies = copies
        self._roots = [(slot, slot.read()) for slot in slots]
        self._tree = frozenset(map(id, (*tree.modules(), *tree.parameters(), *tree.buffers())))
        self._ignored: dict[Any, set[Any]] = {}
        for slot in ignored:
            self._ignored.setdefault(identity(slot.container), set()).add(slot.key)
        self._parts: list[_Part] = []
        self._empty: list[dict[Any, Any]] = []  # of most modules there is nothing else than tables without hooks
        self._others: list[_Part] = []
        self._seen: dict[int, Any] = {}
        self._enter()
        for part in self._parts:
            if isinstance(part, _Entries) and part.empty is not None:
                self._empty.append(part.empty)
            else:
                self._others.append(part)

    def __len__(self) -> int:
        """Return the number of places and objects that are compared."""
        return len(self._roots) + len(self._parts)

    def changes(self) -> Iterator[StateChange]:
        """Yield every place that is not what it was."""
        for slot, before in self._roots:
            if not same(before, now := slot.read()):
                yield StateChange(slot, before, now)
        for part in self._parts if any(self._empty) else self._others:
            if not part.is_same():
                yield from part.changes()

    def first_change(self) -> StateChange | None:
        """Return a place that is not what it was, None if there is none."""
        return next(self.changes(), None)

    def restore(self) -> None:
        """Put everything back; what has no way to be set stays as it is."""
        for part in self._parts:
            part.restore()
        for slot, before in self._roots:
            if slot.read() is not before:
                slot.write(before)

    def _enter(self) -> None:
        waiting = deque((slot, value) for slot, value in self._roots)
        while waiting and len(self._parts) < _MOST_OBJECTS:
            slot, value = waiting.popleft()
            if isinstance(value, SCALARS) or value is ABSENT or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            for part in self._parts_of(slot, value):
                self._parts.append(part)
                waiting.extend((inner, inner.read()) for inner in part.slots())

    def _parts_of(self, slot: Place, value: Any) -> Iterator[_Part]:
        if isinstance(value, type):
            yield from self._class_parts(slot, value)
            return
        if isinstance(value, _FOREIGN_TYPES) or id(value) in self._tree:
            return
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, nn.Parameter):  # a stand-in, say: it counts by identity
                return
            yield _Written(slot, value, copied=self._copies and value.numel() <= _COPIED_ELEMENTS)
            yield _Entries(vars(value), slot, kind="attribute")
            return
        if isinstance(value, _COLLECTIONS):
            yield from self._object_parts(slot, value)
        elif isinstance(value, (tuple, frozenset)):
            yield _Entries(types.MappingProxyType(dict(enumerate(value))), slot)
        elif isinstance(value, types.GeneratorType):
            yield _Entries(Locals(value), replace(slot, path=()), kind="attribute")
        elif (state := inner_state(value)) is not None:
            yield _Stated(slot, *state)
        elif isinstance(value, types.MappingProxyType):
            yield _Entries(value, replace(slot, path=()))
        elif (asked := asked_of(value)) is not None:
            yield _Entries(asked, replace(slot, path=()), kind="attribute")
        elif isinstance(value, types.FunctionType):
            yield from self._function_parts(slot, value)
        elif isinstance(value, tuple(HOLDERS)):
            yield _Entries(held_by(value), slot, kind="held")
        elif not isinstance(value, Iterator):
            yield from self._object_parts(slot, value)

    def _function_parts(self, slot: Place, function: types.FunctionType) -> Iterator[_Part]:
        """Enter a function of the user's: its closure, its defaults and its attributes."""
        if is_library(function.__code__.co_filename):
            return
        cells = Cells(function)
        yield _Entries(cells, slot, hidden=self._ignored.get(identity(cells), frozenset()), kind="cell")
        yield _Entries(types.MappingProxyType(defaults_of(function)), slot, kind="default")
        yield _Entries(vars(function), slot, kind="attribute")

    def _object_parts(self, slot: Place, value: Any) -> Iterator[_Part]:
        """Enter an object: what it contains, its attributes, and its class."""
        hidden: Keys = self._ignored.get(id(value), frozenset())
        if isinstance(value, dict):
            yield _Entries(value, slot, hidden=hidden)
        elif isinstance(value, (list, deque, set)):
            yield _Items(value, slot, hidden=hidden)
        elif _is_foreign(type(value)):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            hidden = self._ignored.get(id(attributes), frozenset())
            yield _Entries(attributes, slot, hidden=hidden, kind="attribute")
        if any("__slots__" in vars(cls) for cls in type(value).__mro__):
            yield _Entries(SlotAttributes(value), slot, kind="slot")
        if is_users(type(value)):
            yield _Entries(classes_of(value), slot, kind="class")

    def _class_parts(self, slot: Place, cls: type) -> Iterator[_Part]:
        """Enter a class of the user's; those of modules are slots."""
        if not is_users(cls) or issubclass(cls, nn.Module):
            return
        internal = {n for n, v in vars(cls).items() if n.startswith("__") and not isinstance(v, types.FunctionType)}
        if issubclass(cls, enum.Enum):  # tables of members: `a | b` adds a flag to them when it is first asked for
            internal |= {name for name in vars(cls) if name.startswith("_") and name.endswith("_")}
        attributes = ClassAttributes(cls)
        hidden: Keys = self._ignored.get(identity(attributes), set()) | internal | {"_abc_impl"}
        yield _Entries(attributes, slot, hidden=hidden, kind="attribute")
        yield _Entries(classes_of(cls), slot, kind="class")


def _version(tensor: torch.Tensor) -> Any:
    return () if tensor.is_inference() else (version_of(tensor), tensor.requires_grad)


def _is_foreign(cls: type) -> bool:
    """Return whether the instances of a class are not entered: those of libraries that keep state of their own."""
    if issubclass(cls, nn.Module):
        return False
    root = cls.__module__.partition(".")[0]
    if root in _OURS_OF_THE_LIBRARY:
        return False
    return root in _FOREIGN_ROOTS or root in sys.stdlib_module_names
