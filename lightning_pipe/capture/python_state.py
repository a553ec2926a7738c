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

import array
import contextvars
import ctypes
import functools
import itertools
import random
import sys
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torchmetrics
from torch import nn

from lightning_pipe.capture.torch_private import outside_of_modes, version_of
from lightning_pipe.capture.users_code import is_library, is_users
from lightning_pipe.lightning_names import pl

Keys: TypeAlias = AbstractSet[Any]
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_MOST_OBJECTS = 100_000  # of one snapshot; what lies beyond (a tokenizer's vocabulary, a graph) counts by identity
_FOREIGN_ROOTS = frozenset(
    {"torch", "lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "lightning_pipe"}
)
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


Path: TypeAlias = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, eq=False)
class Slot:
    """One place where a value is: an entry of a dict or list.

    Attributes:
        container: what can be asked for `key` and given another value for it.
        key: name or index.
        name: the place as the user would write it, such as `self.hparams['alpha']`.
        path: how other ranks find it (`follow`): where it begins, then (kind of step, name or key) per step; () if they
            cannot.
    """

    container: Any
    key: Any
    name: str
    path: Path = ()

    def read(self) -> Any:
        """Return the value, `ABSENT` if there is none."""
        try:
            return self.container[self.key]
        except (KeyError, IndexError):
            return ABSENT

    def write(self, value: Any) -> None:
        """Put a value there; `ABSENT` removes it."""
        if value is ABSENT:
            del self.container[self.key]
        else:
            self.container[self.key] = value

    @property
    def is_writable(self) -> bool:
        """Return whether another value can be put there."""
        return not isinstance(self.container, (types.MappingProxyType, Asked, _Locals))

    @property
    def place(self) -> tuple[Any, Any]:
        """Return what two slots share that are the same place."""
        return _identity(self.container), self.key

    def inside(self, container: Any, key: Any, kind: str) -> Slot:
        """Return a slot in the value of this one."""
        name = {"item": f"{self.name}[{key!r}]", "class": key}.get(kind, f"{self.name}.{key}")
        return Slot(container, key, name, (*self.path, (kind, key)) if self.path else ())


def follow(module: Any, path: Path) -> Slot:
    """Find a place by its path, on any rank."""
    (kind, root), *steps = path
    container: Any
    if kind == "self":
        container = vars(module.get_submodule(root))
    elif kind == "class":
        owners = {f"{c.__module__}.{c.__qualname__}": c for part in module.modules() for c in type(part).__mro__}
        container = ClassAttributes(owners[root])
    elif kind == "optimizers":
        container = module._trainer.optimizers[root[0]].param_groups[root[1]]
    else:
        container = vars(sys.modules[root])
    for (_, key), (next_kind, _) in itertools.pairwise(steps):
        container = _parts_by_kind(container[key], next_kind)
    return Slot(container, steps[-1][1], "".join(str(key) for _, key in steps), path)


def _parts_by_kind(value: Any, kind: str) -> Any:
    """Return what holds the parts of a value that a path leads to by steps of this kind."""
    if kind == "item":
        return value
    if kind == "class":
        return _classes(value)
    if isinstance(value, type):
        return ClassAttributes(value)
    if kind == "cell":
        return _Cells(value)
    if kind == "default":
        return _defaults(value)
    if kind == "held":
        return _held(value)
    return vars(value) if hasattr(value, "__dict__") else _SlotsOf(value, _slot_names_of(type(value)))


def _held(value: Any) -> Mapping[str, Any]:
    """Return what a bound method, a partial function or a property holds."""
    names = next(names for kind, names in _HELD.items() if isinstance(value, kind))
    return types.MappingProxyType({name: getattr(value, name) for name in names})


_HELD: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset", "fdel"),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
}


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


class ClassAttributes(MutableMapping[str, Any]):
    """The attributes of a class as a dict that can be written to."""

    def __init__(self, owner: type) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        return vars(self.owner)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self.owner))

    def __len__(self) -> int:
        return len(vars(self.owner))


class _Cells(dict[str, Any]):
    """Closure, defaults and keyword defaults of a function as a dict."""

    def __init__(self, function: types.FunctionType) -> None:
        super().__init__()
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            return ABSENT

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __iter__(self) -> Iterator[str]:
        return iter(self._cells)

    def __len__(self) -> int:
        return len(self._cells)


class _SlotsOf(dict[str, Any]):
    """Attributes of an object that has `__slots__`, as a dict."""

    def __init__(self, owner: Any, names: Iterable[str]) -> None:
        super().__init__()
        self._owner, self._names = owner, tuple(names)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name, ABSENT)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Asked(dict[str, Any]):
    """What functions return now, as a dict that is only read."""

    def __init__(self, functions: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__(functions)

    def __getitem__(self, name: str) -> Any:
        return dict.__getitem__(self, name)()

    def __setitem__(self, name: str, value: Any) -> None:
        """Leave it: nobody can set what a function returns."""


class _Locals(dict[str, Any]):
    """The variables of a generator, and where it stands, as a dict that is only read."""

    def __init__(self, generator: types.GeneratorType[Any, Any, Any]) -> None:
        super().__init__()
        self._generator = generator

    def _now(self) -> dict[str, Any]:
        frame = self._generator.gi_frame
        return {} if frame is None else {"(position)": frame.f_lasti, **frame.f_locals}

    def __getitem__(self, name: str) -> Any:
        return self._now()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Leave it: nobody can set the variables of a generator."""

    def __delitem__(self, name: str) -> None:
        """Leave it: nobody can remove the variables of a generator."""

    def __contains__(self, name: object) -> bool:
        return name in self._now()

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def _identity(container: Any) -> Any:
    match container:
        case ClassAttributes():
            return id(container.owner)
        case _Cells():
            return tuple(id(cell) for cell in container._cells.values())
        case _SlotsOf():
            return id(container._owner)
    return id(container)


def same(one: Any, two: Any) -> bool:
    """Return whether two values are one object, or equal plain values of one type."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, _SCALARS):
        return bool(one == two) or (one != one and two != two)
    if type(one) in (tuple, frozenset):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, types.MethodType):
        return one.__self__ is two.__self__ and one.__func__ is two.__func__
    return False


@dataclass(frozen=True)
class Change:
    """One place that is not what it was.

    Attributes:
        slot: the place; of a set, queue, array or generator, where that hangs.
        before, now: values; `ABSENT` where there is none.
        is_content: whether the slot has its object, with other content.
    """

    slot: Slot
    before: Any
    now: Any
    is_content: bool = False

    def __str__(self) -> str:
        if self.is_content:
            return f"the content of {self.slot.name} has changed"
        return f"{self.slot.name} was {_short(self.before)} and is {_short(self.now)} now"


def _short(value: Any) -> str:
    if isinstance(value, _SCALARS) or value is ABSENT:
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

    def __init__(self, container: Any, slot: Slot, *, hidden: Keys = frozenset(), kind: str = "item") -> None:
        self._container, self._at, self._hidden, self._kind = container, slot, hidden, kind
        self.content = self._now()

    def _now(self) -> dict[Any, Any]:
        if type(self._container) is dict and not self._hidden:
            return dict(self._container)
        return {key: self._container[key] for key in self._container if not self._hidden or key not in self._hidden}

    def slots(self) -> Iterator[Slot]:
        for key in self.content:
            yield self._slot(key)

    def _slot(self, key: Any) -> Slot:
        return self._at.inside(self._container, key, self._kind)

    def is_same(self) -> bool:
        content, container = self.content, self._container
        if not self._hidden and len(container) != len(content):
            return False
        now = self._now()
        if len(now) != len(content):
            return False
        return all(a == b and same(x, y) for (a, x), (b, y) in zip(now.items(), content.items(), strict=True))

    def changes(self) -> Iterator[Change]:
        now = self._now()
        for key in {**self.content, **now}:
            before, after = self.content.get(key, ABSENT), now.get(key, ABSENT)
            if not same(before, after):
                yield Change(self._slot(key), before, after)
        if now.keys() == self.content.keys() and [*now] != [*self.content]:  # another order
            yield Change(self._at, self._container, self._container, is_content=True)

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

    def __init__(self, container: Any, slot: Slot, *, hidden: Keys = frozenset()) -> None:
        self._container, self._slot, self._hidden = container, slot, hidden
        self.content = list(container)

    def slots(self) -> Iterator[Slot]:
        for index, item in enumerate(self.content):
            container = self._container if isinstance(self._container, list) else dict(enumerate(self.content))
            if type(item) not in _SCALARS:
                yield self._slot.inside(container, index, "item")

    def is_same(self) -> bool:
        if self._hidden:
            return len(self._container) == len(self.content) and next(self._different(), None) is None
        return len(self._container) == len(self.content) and all(map(same, self._container, self.content))

    def _different(self) -> Iterator[int]:
        for index, (before, now) in enumerate(zip(self.content, self._container, strict=True)):
            if index not in self._hidden and not same(before, now):
                yield index

    def changes(self) -> Iterator[Change]:
        if self.is_same():
            return
        now = list(self._container)
        if isinstance(self._container, list) and len(now) == len(self.content):
            for index in self._different():
                slot = self._slot.inside(self._container, index, "item")
                yield Change(slot, self.content[index], now[index])
        else:
            yield Change(self._slot, self.content, now, is_content=True)

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

    def __init__(self, slot: Slot, tensor: torch.Tensor, *, copied: bool) -> None:
        self._slot, self._tensor, self._version = slot, tensor, _version(tensor)
        self._content = tensor.detach().clone() if copied else None

    def slots(self) -> Iterator[Slot]:
        return iter(())

    def is_same(self) -> bool:
        return bool(_version(self._tensor) == self._version)

    def changes(self) -> Iterator[Change]:
        yield Change(self._slot, self._tensor, self._tensor, is_content=True)

    def restore(self) -> None:
        if self._content is not None and not self.is_same():
            with torch.no_grad():
                self._tensor.copy_(self._content)
            self._version = _version(self._tensor)


class _Stated:
    """Something whose state is read and set by functions: a generator of random numbers, an array."""

    def __init__(self, slot: Slot, read: Callable[[], Any], write: Callable[[Any], Any] | None) -> None:
        self._slot, self._read, self._write = slot, read, write
        self._state = read()

    def slots(self) -> Iterator[Slot]:
        return iter(())

    def is_same(self) -> bool:
        return _equal_states(self._read(), self._state)

    def changes(self) -> Iterator[Change]:
        if not self.is_same():
            yield Change(self._slot, self._slot.read(), self._slot.read(), is_content=True)

    def restore(self) -> None:
        if self._write is not None and not self.is_same():
            self._write(self._state)


def _equal_states(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(_equal_states(one[key], two[key]) for key in one)
    if isinstance(one, (tuple, list)):
        return len(one) == len(two) and all(map(_equal_states, one, two))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, two))
    if isinstance(one, torch.Tensor):
        return bool(outside_of_modes(torch.equal)(one, two))
    return bool(one == two)


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
        self, slots: Iterable[Slot], *, tree: nn.Module, ignored: Iterable[Slot] = (), copies: bool = False
    ) -> None:
        self._copies = copies
        self._roots = [(slot, slot.read()) for slot in slots]
        self._tree = frozenset(map(id, (*tree.modules(), *tree.parameters(), *tree.buffers())))
        self._ignored: dict[Any, set[Any]] = {}
        for slot in ignored:
            self._ignored.setdefault(_identity(slot.container), set()).add(slot.key)
        self._parts: list[_Part] = []
        self._seen: dict[int, Any] = {}
        self._enter()

    def __len__(self) -> int:
        """Return the number of places and objects that are compared."""
        return len(self._roots) + len(self._parts)

    def changes(self) -> Iterator[Change]:
        """Yield every place that is not what it was."""
        for slot, before in self._roots:
            if not same(before, now := slot.read()):
                yield Change(slot, before, now)
        for part in self._parts:
            if not part.is_same():
                yield from part.changes()

    def first_change(self) -> Change | None:
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
            if isinstance(value, _SCALARS) or value is ABSENT or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            for part in self._parts_of(slot, value):
                self._parts.append(part)
                waiting.extend((inner, inner.read()) for inner in part.slots())

    def _parts_of(self, slot: Slot, value: Any) -> Iterator[_Part]:
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
        hidden = self._ignored.get(id(value), frozenset())
        if isinstance(value, dict):
            yield _Entries(value, slot, hidden=hidden)
        elif isinstance(value, (list, deque, set)):
            yield _Items(value, slot, hidden=hidden)
        elif isinstance(value, (tuple, frozenset)):
            yield _Entries(types.MappingProxyType(dict(enumerate(value))), slot)
            return
        elif isinstance(value, np.ndarray):
            yield _array(slot, value)
            return
        elif (state := _generator_state(value) or _buffer_state(value)) is not None:
            yield _Stated(slot, *state)
            return
        elif isinstance(value, types.MappingProxyType):
            yield _Entries(value, replace(slot, path=()))
            return
        elif (asked := _asked(value)) is not None:
            yield _Entries(asked, replace(slot, path=()), kind="attribute")
            return
        elif isinstance(value, types.FunctionType):
            if is_library(value.__code__.co_filename):
                return
            cells = _Cells(value)
            hidden = self._ignored.get(_identity(cells), frozenset())
            yield _Entries(cells, slot, hidden=hidden, kind="cell")
            yield _Entries(types.MappingProxyType(_defaults(value)), slot, kind="default")
            yield _Entries(vars(value), slot, kind="attribute")
            return
        elif isinstance(value, tuple(_HELD)):
            yield _Entries(_held(value), slot, kind="held")
            return
        elif isinstance(value, Iterator):
            yield from _iterator(slot, value)
            return
        if _is_foreign(type(value)) and not isinstance(value, (dict, list, set, deque)):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            hidden = self._ignored.get(id(attributes), frozenset())
            yield _Entries(attributes, slot, hidden=hidden, kind="attribute")
        if names := _slot_names_of(type(value)):
            yield _Entries(_SlotsOf(value, names), slot, kind="attribute")
        if is_users(type(value)):
            yield _Entries(_classes(value), slot, kind="class")

    def _class_parts(self, slot: Slot, cls: type) -> Iterator[_Part]:
        """Enter a class of the user's; those of modules are slots."""
        if not is_users(cls) or issubclass(cls, nn.Module):
            return
        internal = {n for n, v in vars(cls).items() if n.startswith("__") and not isinstance(v, types.FunctionType)}
        attributes = ClassAttributes(cls)
        hidden: Keys = self._ignored.get(_identity(attributes), set()) | internal | {"_abc_impl"}
        yield _Entries(attributes, slot, hidden=hidden, kind="attribute")
        yield _Entries(_classes(cls), slot, kind="class")


def _classes(value: Any) -> Mapping[str, type]:
    """Return the class of an object, or the bases and the metaclass of a class, by name."""
    classes = [*value.__bases__, type(value)] if isinstance(value, type) else [type(value)]
    return types.MappingProxyType({cls.__name__: cls for cls in classes})


def _slot_names_of(cls: type) -> list[str]:
    return [name for base in cls.__mro__ for name in _slot_names(base)]


def _slot_names(cls: type) -> list[str]:
    found = vars(cls).get("__slots__", ())
    names = [found] if isinstance(found, str) else list(found)
    private = f"_{cls.__name__.lstrip('_')}"
    return [f"{private}{n}" if n.startswith("__") else n for n in names if not n.endswith("__")]


def _version(tensor: torch.Tensor) -> Any:
    return () if tensor.is_inference() else (version_of(tensor), tensor.requires_grad)


def _array(slot: Slot, array: np.ndarray[Any, Any]) -> _Stated:
    if array.dtype.hasobject:
        return _Stated(slot, lambda: array.tolist(), None)

    def write(content: bytes) -> None:
        array[...] = np.frombuffer(content, dtype=array.dtype).reshape(array.shape)

    if array.nbytes <= _COPIED_BYTES:
        return _Stated(slot, array.tobytes, write if array.flags.writeable else None)
    return _Stated(slot, lambda: zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data), None)


_COPIED_BYTES, _COPIED_ELEMENTS = 2**20, 2**20  # of arrays and tensors whose content can be put back


def state_of(value: Any) -> Any:
    """Return the state of a generator of random numbers, or the content of an array or tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    functions = _generator_state(value)
    return None if functions is None else functions[0]()


def set_state(value: Any, state: Any) -> None:
    """Give a generator its state back, or an array or tensor its content."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(state)
    elif isinstance(value, np.ndarray):
        value[...] = state
    elif (functions := _generator_state(value)) is not None:
        functions[1](state.cpu() if isinstance(state, torch.Tensor) else state)


def _generator_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        bits = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    if isinstance(value, torch.Generator):
        return outside_of_modes(value.get_state), outside_of_modes(value.set_state)
    return None


def _buffer_state(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    if isinstance(value, bytearray):
        return lambda: bytes(value), lambda state: value.__setitem__(slice(None), state)
    if isinstance(value, array.array):
        return value.tobytes, lambda state: value.__setitem__(slice(None), array.array(value.typecode, state))
    if isinstance(value, _NUMBERS_OF_C):
        return lambda: bytes(value), lambda state: ctypes.memmove(ctypes.addressof(value), state, len(state))
    return None


_NUMBERS_OF_C: tuple[Any, ...] = (ctypes.Array, ctypes.Structure, ctypes.c_double.__base__)


def _asked(value: Any) -> Asked | None:
    if isinstance(value, weakref.ref):
        return Asked({"()": value})
    if isinstance(value, contextvars.ContextVar):
        return Asked({"get()": lambda: value.get(ABSENT)})
    return None


def _iterator(slot: Slot, value: Any) -> Iterator[_Entries | _Stated]:
    """Look at an iterator: a generator by its variables and where it stands, others by how they would be pickled."""
    if isinstance(value, types.GeneratorType):
        yield _Entries(_Locals(value), replace(slot, path=()), kind="attribute")
        return
    try:
        value.__reduce__()
    except Exception:  # no way to look into it: it counts by identity
        return
    yield _Stated(slot, lambda: _reduced(value), None)


def _reduced(value: Any) -> Any:
    """Return how an iterator would be pickled, and the iterators that it reads from; other objects by identity."""
    if isinstance(value, Iterator):
        return [_reduced(part) for part in value.__reduce__()[1:]]
    if isinstance(value, (tuple, list)):
        return [_reduced(part) for part in value]
    return value if isinstance(value, _SCALARS) else id(value)


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    positional = {str(i): value for i, value in enumerate(function.__defaults__ or ())}
    return {**positional, **(function.__kwdefaults__ or {})}


def _is_foreign(cls: type) -> bool:
    """Return whether the instances of a class are not entered: those of libraries that keep state of their own."""
    if issubclass(cls, nn.Module):
        return False
    root = cls.__module__.partition(".")[0]
    if root in _OURS_OF_THE_LIBRARY:
        return False
    return root in _FOREIGN_ROOTS or root in sys.stdlib_module_names
