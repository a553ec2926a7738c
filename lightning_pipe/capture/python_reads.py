"""What does the Python of a step read, apart from tensors? Found while it is traced, to be guarded afterwards.

    attributes of modules    seen by a subclass with its own `__getattribute__` that every module has for that time
    attributes of the trainer    likewise; those that change in ways nobody can compare are refused
    globals, class attributes    those that the code names that was seen to run
    closures, helper objects, containers    behind the values of these (`python_state`)

`attribute_slots` and `shared_slots` list all that a step might change, whether it reads it or not.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn

from lightning_pipe.capture.python_state import ClassAttributes, Slot
from lightning_pipe.capture.tracked_number import is_tracked

_METRICS = (torchmetrics.Metric, torchmetrics.MetricCollection)
_TORCHS_TABLES = ("_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_INTERNAL = frozenset("_parameters _buffers _modules training _trainer log log_dict _compiled_call_impl".split())
_RECURRENT = frozenset({"_flat_weights", "_flat_weight_refs"})  # views of its parameters that nn.RNNBase refreshes
_LIGHTNING = frozenset(vars(pl.LightningModule())) - {"_hparams"}
_TORCHS_OWN = frozenset(vars(nn.Module()))
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_MOST_FUNCTIONS = 2000  # of the user's, whose globals are looked for


def attributes_of(owner: nn.Module) -> dict[str, Any]:
    """Return the attributes that a user's step may change: not those that torch and Lightning keep on a module."""
    hidden = _INTERNAL | _LIGHTNING if isinstance(owner, pl.LightningModule) else _INTERNAL
    if isinstance(owner, nn.RNNBase):
        hidden = hidden | _RECURRENT
    return {name: value for name, value in vars(owner).items() if name not in hidden}


def owners_of(module: pl.LightningModule) -> list[tuple[str, nn.Module]]:
    """Return the module and its sub-modules with their paths; torchmetrics objects are left alone."""
    return [(path, owner) for path, owner in module.named_modules() if not isinstance(owner, _METRICS)]


def attribute_slot(path: str, owner: nn.Module, name: str) -> Slot:
    """Return the place of an attribute of the sub-module at a path."""
    prefix = f"self.{path}." if path else "self."
    return Slot(vars(owner), name, prefix + name, (("self", path), ("attribute", name)))


def _class_slot(cls: type, name: str) -> Slot:
    path = (("class", f"{cls.__module__}.{cls.__qualname__}"), ("attribute", name))
    return Slot(ClassAttributes(cls), name, f"{cls.__name__}.{name}", path)


def attribute_slots(module: pl.LightningModule) -> Iterator[Slot]:
    """List the attributes of all modules."""
    for path, owner in owners_of(module):
        for name in attributes_of(owner):
            if name not in _TORCHS_OWN:
                yield attribute_slot(path, owner, name)


def shared_slots(module: pl.LightningModule) -> Iterator[Slot]:
    """List what the user's code shares: data of classes, and globals that the code names."""
    classes = dict.fromkeys(cls for part in module.modules() for cls in type(part).__mro__ if _is_users(cls))
    for cls in classes:
        for name, value in vars(cls).items():
            if _is_data(name, value):
                yield _class_slot(cls, name)
    codes = ((f.__code__, f.__globals__) for cls in classes for f in _functions_of(cls))
    yield from global_slots(_reached(codes))


def global_slots(codes: Iterable[tuple[types.CodeType, dict[str, Any]]]) -> Iterator[Slot]:
    """List the globals that pieces of code name, and of the user's files and classes among them what they name."""
    seen: set[tuple[int, str]] = set()
    for code, namespace in codes:
        names = dict.fromkeys(names_in(code))
        for name in names:
            if name not in namespace:
                continue
            value = namespace[name]
            if isinstance(value, types.ModuleType):
                inner: Any = vars(value) if not is_installed(getattr(value, "__file__", None) or "<") else {}
            elif isinstance(value, type):
                inner = ClassAttributes(value) if _is_users(value) else {}
            elif is_installed(code.co_filename) and not isinstance(value, _SCALARS):
                continue
            else:
                inner = None
            places = [(namespace, name)] if inner is None else [(inner, n) for n in names if n in inner]
            for container, key in places:
                owner = container.owner if isinstance(container, ClassAttributes) else container
                if (id(owner), key) not in seen and (inner is None or _is_data(key, container[key])):
                    seen.add((id(owner), key))
                    if isinstance(container, ClassAttributes):
                        yield _class_slot(container.owner, key)
                    else:
                        path = (("globals", container.get("__name__", "")), ("attribute", key))
                        yield Slot(container, key, key if inner is None else f"{name}.{key}", path)


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a piece of code, and the code inside it, reads as globals or attributes."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from names_in(inner)


def _reached(
    codes: Iterable[tuple[types.CodeType, dict[str, Any]]],
) -> list[tuple[types.CodeType, dict[str, Any]]]:
    """Add the user's functions that code names as globals, and theirs."""
    found: dict[int, tuple[types.CodeType, dict[str, Any]]] = {}
    waiting = list(codes)
    while waiting and len(found) < _MOST_FUNCTIONS:
        code, namespace = waiting.pop()
        if id(code) in found or is_installed(code.co_filename):
            continue
        found[id(code)] = (code, namespace)
        for name in names_in(code):
            value = namespace.get(name)
            if isinstance(value, types.FunctionType):
                waiting.append((value.__code__, value.__globals__))
            elif isinstance(value, type) and _is_users(value):
                waiting.extend((f.__code__, f.__globals__) for f in _functions_of(value))
    return list(found.values())


def _functions_of(cls: type) -> Iterator[types.FunctionType]:
    for value in vars(cls).values():
        for one in (value, getattr(value, "fget", None), getattr(value, "__func__", None)):
            if isinstance(one, types.FunctionType):
                yield one


def _is_users(cls: type) -> bool:
    """Return whether a class is written in a file of the user's, not installed."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and not is_installed(file)


def _is_data(name: str, value: Any) -> bool:
    """Return whether an attribute of a class or file holds data, not code."""
    code = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, property, classmethod, staticmethod)
    return not name.startswith("__") and not isinstance(value, code) and not hasattr(type(value), "__get__")


@functools.cache
def is_library(filename: str) -> bool:
    """Return whether a file belongs to Python, torch, Lightning, torchmetrics, NumPy or this package."""
    if filename.startswith("<frozen") or any(part in filename for part in _LIBRARIES):
        return True
    return filename.startswith(_STANDARD) and "site-packages" not in filename


@functools.cache
def is_installed(filename: str) -> bool:
    """Return whether a file was not written by the user: of a library or any other installed package."""
    return is_library(filename) or "site-packages" in filename or "dist-packages" in filename


_LIBRARIES = ("/torch/", "/lightning/pytorch/", "/lightning/fabric/", "/lightning_pipe/", "/torchmetrics/", "/numpy/")
_STANDARD = (types.__file__ or "").rpartition("/")[0] + "/"


class Reads:
    """Record what is read while a step is traced.

    Args:
        module: the user's module.
        refuse: raises for what cannot be guarded, given what it is.
    """

    def __init__(self, module: pl.LightningModule, refuse: Callable[[str], Any]) -> None:
        self._module, self._refuse = module, refuse
        self._names: dict[tuple[int, str], tuple[str, nn.Module]] = {}
        self._written_first: set[tuple[int, str]] = set()
        self._of_trainer: dict[str, None] = {}
        self._codes: dict[types.CodeType, dict[str, Any]] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record inside."""
        with contextlib.ExitStack() as stack:
            for path, owner in owners_of(self._module):
                stack.enter_context(_other_class(owner, self._methods(path, owner)))
            trainer = self._module._trainer
            if isinstance(trainer, pl.Trainer):
                stack.enter_context(_other_class(trainer, {"__getattribute__": self._trainers(type(trainer))}))
            stack.enter_context(self._code())
            yield

    def is_fresh(self, slot: Slot) -> bool:
        """Return whether the step gave a module's attribute a value before it read it, if it did."""
        return (id(slot.container), slot.key) in self._written_first or (
            (id(slot.container), slot.key) not in self._names
        )

    def slots(self) -> Iterator[Slot]:
        """List the places that were read, and the tables of the modules that decide what a call does."""
        for (_, name), (path, owner) in self._names.items():
            cls = next((cls for cls in type(owner).__mro__ if name in vars(cls)), None)
            if name not in vars(owner) and cls is not None:
                if _is_data(name, vars(cls)[name]):
                    yield _class_slot(cls, name)
            elif not any(name in vars(owner)[table] for table in ("_parameters", "_buffers", "_modules")):
                yield attribute_slot(path, owner, name)
        for path, owner in owners_of(self._module):
            yield from (attribute_slot(path, owner, table) for table in _TORCHS_TABLES)
        for name in self._of_trainer:
            yield Slot(_Attributes(self._module._trainer), name, f"self.trainer.{name}")
        yield from global_slots(self._codes.items())
        if any(_ENVIRONMENT.intersection(code.co_names) for code in self._codes):
            yield Slot(_Environment(), "environ", "os.environ")

    def _methods(self, path: str, owner: nn.Module) -> Mapping[str, Any]:
        cls, names, written = type(owner), self._names, self._written_first
        hidden = frozenset(vars(owner)) - frozenset(attributes_of(owner)) | _TORCHS_OWN
        identity = id(vars(owner))
        read, write = cls.__getattribute__, cls.__setattr__

        def __getattribute__(self: Any, name: str) -> Any:
            if name not in hidden and not name.startswith("__") and (identity, name) not in written:
                names.setdefault((identity, name), (path, owner))
            return read(self, name)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            if (identity, name) not in names:
                written.add((identity, name))
            write(self, name, value)

        return {"__getattribute__": __getattribute__, "__setattr__": __setattr__}

    def _trainers(self, cls: type) -> Callable[[Any, str], Any]:
        def __getattribute__(trainer: Any, name: str) -> Any:
            value = object.__getattribute__(trainer, name)
            if name.startswith("__") or is_library(sys._getframe(1).f_code.co_filename) or callable(value):
                return value
            if isinstance(value, _SCALARS) and not is_tracked(value):
                self._of_trainer.setdefault(name)
            elif name not in _KEPT_BY_TRAINER and not is_tracked(value):
                self._refuse(f"it reads trainer.{name}, which may change from step to step")
            return value

        return __getattribute__

    @contextlib.contextmanager
    def _code(self) -> Iterator[None]:
        """Note the code of every function that is called, but for libraries."""
        codes = self._codes

        def note(frame: types.FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if code not in codes and not is_library(code.co_filename):
                codes[code] = frame.f_globals

        before = sys.gettrace()
        sys.settrace(note)
        try:
            yield
        finally:
            sys.settrace(before)


# what a step reads of the trainer that stays, or whose numbers are tracked
_KEPT_BY_TRAINER = frozenset(
    "optimizers lr_scheduler_configs strategy accelerator callbacks logger loggers model lightning_module".split()
)


_ENVIRONMENT = frozenset({"environ", "getenv"})


class _Environment(dict[str, Any]):
    """The variables of the environment as one value."""

    def __getitem__(self, name: str) -> Any:
        return tuple(sorted(getattr(os, name).items()))


class _Attributes(dict[str, Any]):
    """The attributes of an object, properties too, as a dict that is only read."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None


@contextlib.contextmanager
def _other_class(owner: Any, methods: Mapping[str, Any]) -> Iterator[None]:
    """Give an object a subclass of its class for a while, where that is possible."""
    cls = type(owner)
    if isinstance(owner, torch.jit.ScriptModule):
        yield
        return
    space = {**methods, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    try:
        object.__setattr__(owner, "__class__", type(cls.__name__, (cls,), space))
    except TypeError:  # a class with a layout of its own cannot be swapped
        yield
        return
    try:
        yield
    finally:
        object.__setattr__(owner, "__class__", cls)
