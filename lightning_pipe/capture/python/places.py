"""Places of Python state: where a value is, how it is read and written, and how other ranks find it.

A place (`Place`) is an entry of something that looks like a dict: attributes, items, the variables of a closure, what a
bound method holds. Its path leads there from the module, a class, an optimizer or a global (`follow`).
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

SCALARS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    np.number,
    np.bool_,
    torch.dtype,
    torch.device,
    torch.Size,
)

Path: TypeAlias = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, eq=False)
class Place:
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
        return entry_of(self.container, self.key)

    def reader(self) -> Callable[[Any, Any], Any]:
        """Return what reads the value as `read` does, given the key and `ABSENT`: of a dict its own look-up."""
        if isinstance(self.container, dict) and not isinstance(self.container, Answers):
            look_up: Callable[[Any, Any], Any] = dict.get.__get__(self.container)
            return look_up
        return lambda key, absent: entry_of(self.container, key)

    def write(self, value: Any) -> None:
        """Put a value there; `ABSENT` removes it."""
        if value is ABSENT:
            del self.container[self.key]
        else:
            self.container[self.key] = value

    @property
    def is_writable(self) -> bool:
        """Return whether another value can be put there."""
        return not isinstance(self.container, (types.MappingProxyType, Asked, ReadOnlyView))

    @property
    def place(self) -> tuple[Any, Any]:
        """Return what two slots share that are the same place."""
        return identity(self.container), self.key

    def inside(self, container: Any, key: Any, kind: str) -> Place:
        """Return a slot in the value of this one."""
        key_text = f"a {type(key).__name__}" if isinstance(key, torch.Tensor) else repr(key)
        name = {"item": f"{self.name}[{key_text}]", "class": key}.get(kind, f"{self.name}.{key}")
        return Place(container, key, name, (*self.path, (kind, key)) if self.path else ())


class Answers(dict[Any, Any]):
    """A dict of this package that is asked through its own methods; others' are looked at as they are."""


def entry_of(container: Any, key: Any) -> Any:
    """Return what a container has, or `ABSENT`; of dicts and lists as they are, whatever a subclass does when asked."""
    if isinstance(container, dict) and not isinstance(container, Answers):
        return dict.get(container, key, ABSENT)
    try:
        return list.__getitem__(container, key) if isinstance(container, list) else container[key]
    except (KeyError, IndexError):
        return ABSENT


def follow(module: Any, path: Path) -> Place:
    """Find a place by its path, on any rank."""
    (kind, root), *steps = path
    container: Any
    if kind == "self":
        container = vars(module.get_submodule(root))
    elif kind == "hooks":
        container = list(vars(module.get_submodule(root[0]))[root[1]].values())
    elif kind == "class":
        owners = {f"{c.__module__}.{c.__qualname__}": c for part in module.modules() for c in type(part).__mro__}
        container = ClassAttributes(owners[root])
    elif kind == "datamodule":
        container = vars(module._trainer.datamodule)
    elif kind == "optimizers":
        container = module._trainer.optimizers[root[0]].param_groups[root[1]]
    else:
        container = vars(sys.modules[root])
    for (_, key), (next_kind, _) in itertools.pairwise(steps):
        if (value := entry_of(container, key)) is ABSENT:
            raise KeyError(key)
        container = _parts_by_kind(value, next_kind)
    return Place(container, steps[-1][1], "".join(str(key) for _, key in steps), path)


def _parts_by_kind(value: Any, kind: str) -> Any:
    """Return what holds the parts of a value that a path leads to by steps of this kind."""
    if kind == "item":
        return value
    if kind == "class":
        return classes_of(value)
    if isinstance(value, type):
        return ClassAttributes(value)
    if kind == "cell":
        return Cells(value)
    if kind == "default":
        return defaults_of(value)
    if kind == "held":
        return held_by(value)
    if kind == "slot":
        return SlotAttributes(value)
    return Attributes(value)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


class _AttributesOfOwner(MutableMapping[str, Any]):
    """What `vars` of an object or a class has whenever it is looked at."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        return vars(self.owner)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self.owner))

    def __len__(self) -> int:
        return len(vars(self.owner))


class Attributes(_AttributesOfOwner):
    """The attributes of an object in the `__dict__` that it has at the time, as it may be given another one."""

    def __setitem__(self, name: str, value: Any) -> None:
        vars(self.owner)[name] = value

    def __delitem__(self, name: str) -> None:
        del vars(self.owner)[name]


class ClassAttributes(_AttributesOfOwner):
    """The attributes of a class as a dict that can be written to."""

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.owner, name)


class Cells(MutableMapping[str, Any]):
    """The closure of a function as a dict; variables that have no value yet are absent."""

    def __init__(self, function: types.FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    @property
    def identity(self) -> tuple[int, ...]:
        """Return what two functions share that share their closure."""
        return tuple(map(id, self._cells.values()))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cells[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class SlotAttributes(MutableMapping[str, Any]):
    """The attributes of an object that its classes list in `__slots__`, as a dict; those without value are absent."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self._members: dict[str, Any] = {}
        for cls in type(owner).__mro__:
            if "__slots__" in vars(cls):
                found = {n: m for n, m in vars(cls).items() if isinstance(m, types.MemberDescriptorType)}
                self._members = found | self._members

    def __getitem__(self, name: str) -> Any:
        try:
            return self._members[name].__get__(self.owner)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._members[name].__set__(self.owner, value)

    def __delitem__(self, name: str) -> None:
        self._members[name].__delete__(self.owner)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._members if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Asked(Answers):
    """What functions return now, as a dict that is only read."""

    def __init__(self, functions: Mapping[str, Callable[[], Any]]) -> None:
        super().__init__(functions)

    def __getitem__(self, name: str) -> Any:
        return dict.__getitem__(self, name)()

    def __setitem__(self, name: str, value: Any) -> None:
        """Leave it: nobody can set what a function returns."""


def asked_place(name: str, function: Callable[[], Any]) -> Place:
    """Return the place of what a function answers.

    Args:
        name: the place as the user would write it.
        function: returns the value of the moment.
    """
    return Place(Asked({"": function}), "", name)


class ReadOnlyView(Answers):
    """Entries that a function returns whenever they are looked at, as a dict that is only read.

    Args:
        find: returns the entries of the moment.
    """

    def __init__(self, find: Callable[[], Mapping[Any, Any]]) -> None:
        super().__init__()
        self._find = find

    def __getitem__(self, key: Any) -> Any:
        return self._find()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Leave it: nobody can set what a function returns."""

    def __delitem__(self, key: Any) -> None:
        """Leave it: nobody can remove what a function returns."""

    def __contains__(self, key: object) -> bool:
        return key in self._find()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._find())

    def __len__(self) -> int:
        return len(self._find())

    def now(self) -> dict[Any, Any]:
        """Return the entries of the moment."""
        return {**self._find()}


def locals_of(generator: types.GeneratorType[Any, Any, Any]) -> ReadOnlyView:
    """Return the variables of a generator, and where it stands."""

    def find() -> dict[str, Any]:
        frame = generator.gi_frame
        return {} if frame is None else {"(position)": frame.f_lasti, **frame.f_locals}

    return ReadOnlyView(find)


def identity(container: Any) -> Any:
    """Return what two containers share that are the same one."""
    match container:
        case ClassAttributes():
            return id(container.owner)
        case Cells():
            return container.identity
        case SlotAttributes():
            return id(container.owner)
        case Attributes():
            return id(vars(container.owner))
    return id(container)


def held_by(value: Any) -> ReadOnlyView:
    """Return what a bound method, a partial function or a property holds."""
    names = next(names for kind, names in HOLDERS.items() if isinstance(value, kind))
    return ReadOnlyView(lambda: {name: getattr(value, name) for name in names})


HOLDERS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset", "fdel"),
    classmethod: ("__func__",),
    staticmethod: ("__func__",),
}


def classes_of(value: Any) -> ReadOnlyView:
    """Return the class of an object, or the bases and the metaclass of a class, by name."""

    def find() -> dict[str, type]:
        classes = [*value.__bases__, type(value)] if isinstance(value, type) else [type(value)]
        return {cls.__name__: cls for cls in classes}

    return ReadOnlyView(find)


def defaults_of(function: types.FunctionType) -> ReadOnlyView:
    """Return the code of a function, and its defaults by position or name."""

    def find() -> dict[str, Any]:
        positional = {str(i): value for i, value in enumerate(function.__defaults__ or ())}
        return {"__code__": function.__code__, **positional, **(function.__kwdefaults__ or {})}

    return ReadOnlyView(find)


def asked_of(value: Any) -> Asked | None:
    """Return what a weak reference or a context variable answers; None for anything else."""
    if isinstance(value, weakref.ref):
        return Asked({"()": value})
    if isinstance(value, contextvars.ContextVar):
        return Asked({"get()": lambda: value.get(ABSENT)})
    return None


def same(one: Any, two: Any) -> bool:
    """Return whether two values are one object, or equal plain values of one type."""
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, SCALARS):
        return bool(one == two) or (one != one and two != two)
    if type(one) in (tuple, frozenset):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, types.MethodType):
        return one.__self__ is two.__self__ and one.__func__ is two.__func__
    return False
