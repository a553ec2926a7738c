"""Snapshots of Python state: what a module, its helpers and the globals of its code hold, to compare and to put back.

A snapshot begins at *slots* (an attribute, a global, a default argument) and goes down through lists, dicts, sets,
queues, tuples, instances of classes, the user's classes, functions with their closures, defaults and attributes,
partial functions, generators, weak references and generators of random numbers. Of each it keeps what was in it. It
ends at what has no Python state of its own or is somebody else's: modules of the tree and their classes (their
attributes are slots), parameters and buffers, the trainer with its optimizers and schedulers, data sets, loggers, most
objects of the standard library.
Tensors count by identity and version, NumPy arrays by content.

    Snapshot(slots).changes()        where something is no longer what it was
    Snapshot(slots).restore()        put it back
"""

from __future__ import annotations

import enum
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torchmetrics
from torch import nn

from lightning_pipe.capture.python.inner_states import inner_state
from lightning_pipe.capture.python.places import (
    ABSENT,
    HOLDERS,
    SCALARS,
    Attributes,
    Cells,
    ClassAttributes,
    Place,
    SlotAttributes,
    asked_of,
    classes_of,
    defaults_of,
    held_by,
    identity,
    locals_of,
    same,
)
from lightning_pipe.capture.python.snapshot_parts import (
    DictContent,
    InnerContent,
    Keys,
    ListContent,
    SnapshotPart,
    StateChange,
    TensorContent,
)
from lightning_pipe.capture.python.state_slots import optimizers_of
from lightning_pipe.capture.python.users_code import is_library, is_users
from lightning_pipe.lightning_names import pl

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


class Snapshot:
    """The Python state behind some slots at one moment.

    Args:
        slots: where it begins.
        tree: module whose sub-modules, parameters and buffers are not entered.
        ignored: places inside that are not looked at.
        copies: whether the content of tensors can be put back, too.

    Attributes:
        shared: identities of objects that it has met in several places.
    """

    def __init__(
        self, slots: Iterable[Place], *, tree: nn.Module, ignored: Iterable[Place] = (), copies: bool = False
    ) -> None:
        self._copies = copies
        self._roots = [(slot, slot.read()) for slot in slots]
        self._readers = [(slot.reader(), slot.key, slot, value) for slot, value in self._roots]
        of_trainer = (owner for _, owner in optimizers_of(getattr(tree, "_trainer", None)))
        self._tree = frozenset(map(id, (*tree.modules(), *tree.parameters(), *tree.buffers(), *of_trainer)))
        self._ignored: dict[Any, set[Any]] = {}
        for slot in ignored:
            self._ignored.setdefault(identity(slot.container), set()).add(slot.key)
        self._parts: list[SnapshotPart] = []
        self._empty: list[dict[Any, Any]] = []  # of most modules there is nothing else than tables without hooks
        self._others: list[SnapshotPart] = []
        self._seen: dict[int, tuple[Any, Place]] = {}
        self.shared: set[int] = set()
        self._enter()
        for part in self._parts:
            if isinstance(part, DictContent) and part.empty is not None:
                self._empty.append(part.empty)
            else:
                self._others.append(part)

    def __len__(self) -> int:
        """Return the number of places and objects that are compared."""
        return len(self._roots) + len(self._parts)

    def changes(self) -> Iterator[StateChange]:
        """Yield every place that is not what it was."""
        for read, key, slot, before in self._readers:  # many, before every batch
            now = read(key, ABSENT)
            if now is not before and not same(before, now):
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
            if isinstance(value, SCALARS) or value is ABSENT:
                continue
            if id(value) in self._seen:
                if self._seen[id(value)][1].place != slot.place:
                    self.shared.add(id(value))
                continue
            self._seen[id(value)] = (value, slot)
            for part in self._parts_of(slot, value):
                self._parts.append(part)
                waiting.extend((inner, inner.read()) for inner in part.slots())

    def _parts_of(self, slot: Place, value: Any) -> Iterator[SnapshotPart]:
        if isinstance(value, type):
            yield from self._class_parts(slot, value)
            return
        if isinstance(value, _FOREIGN_TYPES) or id(value) in self._tree:
            return
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, nn.Parameter):  # a stand-in, say: it counts by identity
                return
            yield TensorContent(slot, value, copied=self._copies and value.numel() <= _COPIED_ELEMENTS)
            yield DictContent(Attributes(value), slot, kind="attribute")
            return
        if isinstance(value, _COLLECTIONS):
            yield from self._object_parts(slot, value)
        elif isinstance(value, (tuple, frozenset)):
            yield DictContent(types.MappingProxyType(dict(enumerate(value))), slot)
        elif isinstance(value, types.GeneratorType):
            yield DictContent(locals_of(value), replace(slot, path=()), kind="attribute")
        elif (state := inner_state(value)) is not None:
            yield InnerContent(slot, *state)
        elif isinstance(value, types.MappingProxyType):
            yield DictContent(value, replace(slot, path=()))
        elif (asked := asked_of(value)) is not None:
            yield DictContent(asked, replace(slot, path=()), kind="attribute")
        elif isinstance(value, types.FunctionType):
            yield from self._function_parts(slot, value)
        elif isinstance(value, tuple(HOLDERS)):
            yield DictContent(held_by(value), slot, kind="held")
        elif not isinstance(value, Iterator):
            yield from self._object_parts(slot, value)

    def _function_parts(self, slot: Place, function: types.FunctionType) -> Iterator[SnapshotPart]:
        """Enter a function of the user's: its closure, its defaults and its attributes."""
        if is_library(function.__code__.co_filename):
            return
        cells = Cells(function)
        yield DictContent(cells, slot, hidden=self._ignored.get(identity(cells), frozenset()), kind="cell")
        yield DictContent(defaults_of(function), slot, kind="default")
        yield DictContent(Attributes(function), slot, kind="attribute")

    def _object_parts(self, slot: Place, value: Any) -> Iterator[SnapshotPart]:
        """Enter an object: what it contains, its attributes, and its class."""
        hidden: Keys = self._ignored.get(id(value), frozenset())
        if isinstance(value, dict):
            yield DictContent(value, slot, hidden=hidden)
        elif isinstance(value, (list, deque, set)):
            yield ListContent(value, slot, hidden=hidden)
        if _is_foreign(type(value)):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            hidden = self._ignored.get(id(attributes), frozenset())
            yield DictContent(Attributes(value), slot, hidden=hidden, kind="attribute")
        if any("__slots__" in vars(cls) for cls in type(value).__mro__):
            yield DictContent(SlotAttributes(value), slot, kind="slot")
        if is_users(type(value)):
            yield DictContent(classes_of(value), slot, kind="class")

    def _class_parts(self, slot: Place, cls: type) -> Iterator[SnapshotPart]:
        """Enter a class of the user's; those of modules are slots."""
        if not is_users(cls) or issubclass(cls, nn.Module):
            return
        internal = {n for n, v in vars(cls).items() if n.startswith("__") and not isinstance(v, types.FunctionType)}
        if issubclass(cls, enum.Enum):  # tables of members: `a | b` adds a flag to them when it is first asked for
            internal |= {name for name in vars(cls) if name.startswith("_") and name.endswith("_")}
        attributes = ClassAttributes(cls)
        hidden: Keys = self._ignored.get(identity(attributes), set()) | internal | {"_abc_impl"}
        yield DictContent(attributes, slot, hidden=hidden, kind="attribute")
        yield DictContent(classes_of(cls), slot, kind="class")


def _is_foreign(cls: type) -> bool:
    """Return whether the instances of a class are not entered: those of libraries that keep state of their own."""
    if issubclass(cls, nn.Module):
        return False
    root = cls.__module__.partition(".")[0]
    if root in _OURS_OF_THE_LIBRARY:
        return False
    return root in _FOREIGN_ROOTS or root in sys.stdlib_module_names
