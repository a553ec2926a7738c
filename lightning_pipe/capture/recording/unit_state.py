"""State that a module keeps between calls of its step: how changes are found, and how they are undone.

What is looked at: attributes of all sub-modules, what lists, dicts, sets and queues among them hold, buffers, and the
memory and content of parameters, and attributes and collections of helpers that are no modules. What objects without
attributes keep inside (a NumPy generator) is not seen.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pipe.capture.python.places import ABSENT, Path, follow, same
from lightning_pipe.capture.python.state_slots import attributes_of, owners_of
from lightning_pipe.capture.recording.replay_state import same_content
from lightning_pipe.capture.steps.batch import LeafSlot
from lightning_pipe.capture.steps.metric_result import is_result
from lightning_pipe.capture.steps.module_tables import HookTables, refill
from lightning_pipe.capture.steps.record import KeptState as LeftBehind
from lightning_pipe.capture.steps.step_state import ModuleState
from lightning_pipe.capture.torch_private import TorchDispatchMode, has_storage, written_by
from lightning_pipe.capture.torchmetrics_objects import is_metric_or_collection
from lightning_pipe.lightning_names import pl

_TORCHS_OWN = frozenset(vars(nn.Module()))
_CHANGEABLE = (list, dict, set, deque)
_DEEPEST = 4


def tensors_in(value: Any, *, objects: bool = False, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested collections and data classes; with `objects`, also in attributes of other objects."""
    if isinstance(value, torch.Tensor) and not is_result(value):
        yield value
        return
    items = _items(value)
    if items is None and objects and depth < _DEEPEST:
        items, depth = _held_by(value), depth + 1
    for item in () if items is None else items:  # a collection may have no length
        yield from tensors_in(item, objects=objects, depth=depth)


def uncut_object(template: Any) -> str:
    """Name the class of an object in a batch that holds tensors, or is an array; "" if there is none.

    A micro-batch is given it as it is, since nobody knows where its samples are.
    """
    if isinstance(template, (LeafSlot, int, float, complex)) or (items := _items(template)) == ():
        return ""
    if items is not None:
        return next(filter(None, map(uncut_object, items)), "")
    is_moved = hasattr(type(template), "to") or isinstance(template, np.ndarray)  # by Lightning, to a device
    return type(template).__name__ if is_moved or any(True for _ in tensors_in(template, objects=True)) else ""


def _held_by(value: Any) -> list[Any]:
    """List what an object of any class holds in attributes."""
    slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]


def _items(value: Any) -> Iterable[Any] | None:
    """Return what a collection or a data class holds; None for another object."""
    if isinstance(value, (str, bytes, nn.Module, type)) or value is None:
        return ()
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return value
    if is_dataclass(value):
        return [getattr(value, item.name, None) for item in fields(value)]
    return None


@dataclass(frozen=True)
class Held:
    """What one module holds itself, not in sub-modules.

    Attributes:
        content: attributes, buffers and parameters by name.
        inside: what there is inside collections that can change and inside helpers, and the address of a parameter's
            memory.
    """

    content: dict[str, Any]
    inside: dict[str, tuple[Any, ...]]

    def changed_since(self, before: Held) -> list[str]:
        """Return the names of what is not as it was."""
        old, new = before.content, self.content
        changed = [name for name in new if name not in old or not same(new[name], old[name])]
        kept = [name for name, items in self.inside.items() if not _same_items(items, before.inside.get(name, items))]
        return [*changed, *(name for name in kept if name not in changed), *(name for name in old if name not in new)]


def _same_items(one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
    return len(one) == len(two) and all(map(same, one, two))


def prefixed_owners(module: pl.LightningModule) -> list[tuple[str, nn.Module]]:
    """Return the owners of a module's state with the beginning of their names."""
    return [(f"{path}." if path else "", owner) for path, owner in owners_of(module)]


def held_by(owner: nn.Module) -> Held:
    """Return what a module holds now."""
    content = {name: value for name, value in attributes_of(owner).items() if name not in _TORCHS_OWN}
    inside = {name: _inside(value) for name, value in content.items() if isinstance(value, _CHANGEABLE)}
    parameters = dict(owner.named_parameters(recurse=False))
    content.update(owner.named_buffers(recurse=False))
    return Held({**content, **parameters}, {**inside, **{name: (p.data_ptr(),) for name, p in parameters.items()}})


def _inside(value: Any) -> tuple[Any, ...]:
    return (*value, *value.values()) if isinstance(value, dict) else tuple(value)


class StateWatch:
    """Tell what has changed since the last question."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._owners = prefixed_owners(module)
        self._before = [held_by(owner) for _, owner in self._owners]

    def changed(self) -> dict[str, Any]:
        """Return what is held now, by path, where it differs; None for what is gone."""
        before, now = self._before, [held_by(owner) for _, owner in self._owners]
        self._before = now
        return {
            prefix + name: new.content.get(name)
            for (prefix, _), old, new in zip(self._owners, before, now, strict=True)
            for name in new.changed_since(old)
        }


class PlaceWatch:
    """Tell which of some places of Python state have changed since the last question.

    Args:
        module: the user's module.
        paths: of the places.
    """

    def __init__(self, module: pl.LightningModule, paths: Iterable[Path] = ()) -> None:
        self._module = module
        self._before = {path: self._content(path) for path in paths}

    def changed(self) -> list[Path]:
        """Return the paths of the places that have changed."""
        before, self._before = self._before, {path: self._content(path) for path in self._before}
        return [path for path, now in self._before.items() if not same_content(now, before[path])]

    def _content(self, path: Path) -> Any:
        try:
            value = follow(self._module, path).read()
        except KeyError:  # something on the way to it is not there
            return ABSENT
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return copy(value) if isinstance(value, _CHANGEABLE) else value


class ModuleSnapshot:
    """Content of a module at one moment.

    Attributes:
        keeper: to be entered around the first run, and every run that need not be quick: keeps the content of
            parameters that are about to be written to (of only those, for there may be many).
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.keeper = _Keeper(module)
        self._buffers = {name: (buffer, buffer.detach().clone()) for name, buffer in module.named_buffers()}
        self._state, self._undo = ModuleState(module, copies=True), _undo(module)

    def left(self) -> tuple[LeftBehind, ...]:
        """List what has changed of Python state since."""
        return tuple(self._state.kept())

    def changed_buffers(self) -> frozenset[str]:
        """Return the names of the buffers whose content has changed since."""
        return frozenset(name for name, (buffer, content) in self._buffers.items() if not same_content(buffer, content))

    def restore(self) -> None:
        """Put everything back."""
        self._state.restore()
        for action in self._undo:
            action()
        with torch.no_grad():
            for buffer, content in self._buffers.values():
                buffer.copy_(content)
        self.keeper.restore()


@contextlib.contextmanager
def left_as_it_was(module: pl.LightningModule) -> Iterator[ModuleSnapshot]:
    """Put back whatever the runs inside change of a module; gradients are set aside."""
    kept = ModuleSnapshot(module)
    gradients = [(p, p.grad) for p in module.parameters()]
    for p, _ in gradients:
        p.grad = None
    try:
        yield kept
    finally:
        kept.restore()
        for p, gradient in gradients:
            p.grad = gradient


def _undo(module: pl.LightningModule) -> list[Callable[[], object]]:
    actions: list[Callable[[], object]] = [HookTables(module).restore]
    for owner in module.modules():
        for table in (owner._parameters, owner._buffers, owner._modules):
            actions.append(partial(refill, table, dict(table)))
        if is_metric_or_collection(owner):
            continue
        actions.append(partial(setattr, owner, "training", owner.training))
    actions += [partial(_put_back, p, p.data, p.requires_grad) for p in module.parameters()]
    return actions


def _put_back(parameter: nn.Parameter, data: torch.Tensor, requires_grad: bool) -> None:
    if parameter.data_ptr() != data.data_ptr():
        parameter.data = data
    if parameter.requires_grad != requires_grad:
        parameter.requires_grad_(requires_grad)


class _Keeper(TorchDispatchMode):
    """Keep the content of parameters that are about to be written to."""

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        named = {p.untyped_storage().data_ptr(): (name, p) for name, p in module.named_parameters()}
        self._parameters = {where: parameter for where, (_, parameter) in named.items()}
        self._names = {where: name for where, (name, _) in named.items()}
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look whether the operation writes to a parameter, and run it."""
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):
            where = tensor.untyped_storage().data_ptr() if has_storage(tensor) else 0
            if where in self._parameters and where not in self._kept:
                data = self._parameters[where].data
                self._kept[where] = (data, data.clone())
        return func(*args, **kwargs)

    def names(self) -> frozenset[str]:
        """Return the names of the parameters that were written to."""
        return frozenset(self._names[where] for where in self._kept)

    def restore(self) -> None:
        """Write the kept contents back."""
        for data, content in self._kept.values():
            data.copy_(content)
