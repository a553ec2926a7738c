"""Places where the Python state of a step may lie: attributes, closures, globals, numbers of optimizers."""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from lightning_pipe.capture.python.places import Answers, ClassAttributes, Place
from lightning_pipe.capture.python.users_code import (
    Code,
    functions_in,
    functions_of,
    is_installed,
    is_users,
    names_in,
    reached,
)
from lightning_pipe.capture.torchmetrics_objects import is_metric_or_collection
from lightning_pipe.lightning_names import pl

_INTERNAL = frozenset("_parameters _buffers _modules training _trainer log log_dict _compiled_call_impl".split())
_RECURRENT = frozenset({"_flat_weights", "_flat_weight_refs"})  # views of its parameters that nn.RNNBase refreshes
_LIGHTNING = frozenset(vars(pl.LightningModule())) - {"_hparams"}
TORCHS_OWN = frozenset(vars(nn.Module()))
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
PYTHON_SCALARS = (bool, int, float, complex, str, bytes, type(None))


def attributes_of(owner: nn.Module) -> dict[str, Any]:
    """Return the attributes that a user's step may change: not those that torch and Lightning keep on a module."""
    hidden = _INTERNAL | _LIGHTNING if isinstance(owner, pl.LightningModule) else _INTERNAL
    if isinstance(owner, nn.RNNBase):
        hidden = hidden | _RECURRENT
    return {name: value for name, value in vars(owner).items() if name not in hidden}


def owners_of(module: pl.LightningModule) -> list[tuple[str, nn.Module]]:
    """Return the module and its sub-modules with their paths; torchmetrics objects are left alone."""
    return [(path, owner) for path, owner in module.named_modules() if not is_metric_or_collection(owner)]


def attribute_slot(path: str, owner: nn.Module, name: str) -> Place:
    """Return the place of an attribute of the sub-module at a path."""
    prefix = f"self.{path}." if path else "self."
    return Place(vars(owner), name, prefix + name, (("self", path), ("attribute", name)))


def class_slot(cls: type, name: str) -> Place:
    """Return the place of an attribute of a class."""
    path = (("class", f"{cls.__module__}.{cls.__qualname__}"), ("attribute", name))
    return Place(ClassAttributes(cls), name, f"{cls.__name__}.{name}", path)


def attribute_slots(module: pl.LightningModule) -> Iterator[Place]:
    """List the attributes of all modules."""
    for path, owner in owners_of(module):
        for name in attributes_of(owner):
            if name not in TORCHS_OWN:
                yield attribute_slot(path, owner, name)


def shared_slots(module: pl.LightningModule) -> Iterator[Place]:
    """List what the user's code shares: attributes of classes, closures of methods, and globals that the code names."""
    classes = module_classes(module)
    for cls in classes:
        for name, value in vars(cls).items():
            if has_state(name, value):
                yield class_slot(cls, name)
    yield from global_slots(reached((f.__code__, f.__globals__) for cls in classes for f in functions_of(cls)))
    yield from optimizer_slots(module._trainer)


def hook_slots(module: pl.LightningModule) -> Iterator[Place]:
    """List the hooks of sub-modules by their order, as handles have other numbers on other ranks."""
    for path, owner in owners_of(module):
        for name in HOOK_TABLES:
            if table := vars(owner).get(name):
                hooks = list(table.values())
                for number in range(len(hooks)):
                    yield Place(hooks, number, f"hook of {path or 'self'}", (("hooks", (path, name)), ("item", number)))


def data_module_slots(trainer: Any) -> Iterator[Place]:
    """List the attributes of the data module that its hooks of the transfer name, there or not, and their globals."""
    owner = getattr(trainer, "datamodule", None)
    if owner is None:
        return
    classes = [cls for cls in type(owner).__mro__ if cls not in pl.LightningDataModule.__mro__]
    names, waiting, codes = dict[str, None](), [*TRANSFER_HOOKS], list[Code]()
    while waiting:
        if (name := waiting.pop()) in names:
            continue
        names[name] = None
        for function in itertools.chain.from_iterable(functions_in(vars(cls).get(name)) for cls in classes):
            codes.append((function.__code__, function.__globals__))
            waiting.extend(names_in(function.__code__))
    for name in names:
        yield Place(vars(owner), name, f"datamodule.{name}", (("datamodule", ""), ("attribute", name)))
    yield from global_slots(reached(codes))


def optimizer_slots(trainer: Any) -> Iterator[Place]:
    """List the places of numbers that optimizers and schedulers change: learning rates, momenta."""
    for o, optimizer in enumerate(getattr(trainer, "optimizers", None) or ()):
        for g, group in enumerate(optimizer.param_groups):
            found = _Found(partial(lambda o, g: trainer.optimizers[o].param_groups[g], o, g))
            path = (("optimizers", (o, g)),)
            for key in group:
                name = f"optimizers[{o}].param_groups[{g}][{key!r}]"
                yield Place(found, key, name, (*path, ("item", key)))
    for s, config in enumerate(getattr(trainer, "lr_scheduler_configs", None) or ()):
        of = partial(lambda s: trainer.lr_scheduler_configs[s].scheduler, s)
        yield Place(_Found(partial(lambda of: vars(of()), of)), "last_epoch", f"lr_schedulers[{s}].last_epoch")
        for i in range(len(getattr(config.scheduler, "_last_lr", ()))):
            yield Place(_Found(partial(lambda of: of()._last_lr, of)), i, f"lr_schedulers[{s}].get_last_lr()[{i}]")


def optimizers_of(trainer: Any) -> tuple[tuple[str, Any], ...]:
    """Return the optimizers and schedulers that the trainer has now, with the names of their places."""
    optimizers, configs = getattr(trainer, "optimizers", None) or (), getattr(trainer, "lr_scheduler_configs", None)
    return (
        *((f"optimizers[{o}]", optimizer) for o, optimizer in enumerate(optimizers)),
        *((f"lr_scheduler_configs[{s}]", config) for s, config in enumerate(configs or ())),
        *((f"lr_schedulers[{s}]", config.scheduler) for s, config in enumerate(configs or ())),
    )


class _Found(Answers):
    """A dict or list that is looked for whenever it is asked, since others replace it."""

    def __init__(self, find: Callable[[], Any]) -> None:
        super().__init__()
        self._find = find

    def __getitem__(self, key: Any) -> Any:
        return self._find()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._find()[key] = value


def module_classes(module: nn.Module) -> list[type]:
    """List the user's classes of a module and its sub-modules, with their bases."""
    return list(dict.fromkeys(cls for part in module.modules() for cls in type(part).__mro__ if is_users(cls)))


def global_slots(codes: Iterable[Code]) -> Iterator[Place]:
    """List the globals that pieces of code name, and of the user's files and classes among them what they name."""
    listed: set[Any] = set()
    for code, namespace in codes:
        names = dict.fromkeys(names_in(code))
        root = Place({"": namespace}, "", "", (("globals", namespace.get("__name__", "")),))
        for slot in _named(namespace, root, names, set()):  # others read other attributes of the same class or file
            is_wanted = not is_installed(code.co_filename) or isinstance(slot.read(), PYTHON_SCALARS)
            if is_wanted and slot.place not in listed:
                listed.add(slot.place)
                yield slot


def _named(container: Any, owner: Place, names: Iterable[str], seen: set[Any]) -> Iterator[Place]:
    """List places in a file or class, and in the user's files and classes there, that have one of these names."""
    for name in names:
        if name not in container:
            continue
        slot = owner.inside(container, name, "attribute")
        slot = replace(slot, name=slot.name.removeprefix("."))
        if slot.place in seen:
            continue
        seen.add(slot.place)
        value = container[name]
        if isinstance(value, types.ModuleType):
            is_builtin = value.__name__ in sys.builtin_module_names  # the first import changes `sys.modules`
            if not is_builtin and not is_installed(getattr(value, "__file__", None) or "<"):
                inside = replace(slot, path=(("globals", value.__name__),))
                yield from _named(vars(value), inside, names, seen)
        elif isinstance(value, type):
            if is_users(value):
                yield from _of_class(value, slot, names, seen)
        elif has_state(name, value):
            yield slot


def _of_class(cls: type, owner: Place, names: Iterable[str], seen: set[Any]) -> Iterator[Place]:
    """List attributes of a class, of those that it inherits from, and of its metaclass; absent ones may appear."""
    classes = [one for one in (*cls.__mro__, type(cls)) if is_users(one)]
    known = [name for name in names if any(name in vars(one) for one in classes)]
    for one in classes:
        inside = owner if one is cls else Place({}, one, one.__name__)
        yield from _named(ClassAttributes(one), inside, names, seen)
        for name in known:
            slot = inside.inside(ClassAttributes(one), name, "attribute")
            if name not in vars(one) and slot.place not in seen:
                seen.add(slot.place)
                yield slot


def has_state(name: str, value: Any) -> bool:
    """Return whether an attribute of a class or file holds data or a function, which may hold some."""
    if isinstance(value, (types.BuiltinFunctionType, types.ModuleType, type)) or inspect.isdatadescriptor(value):
        return isinstance(value, property) or _is_users_object(value)
    is_internal = name.startswith("__") and not isinstance(value, types.FunctionType)
    return not is_internal and not isinstance(value, (types.WrapperDescriptorType, types.MethodDescriptorType))


def _is_users_object(value: Any) -> bool:
    return not isinstance(value, (types.ModuleType, type)) and is_users(type(value))
