"""Python reads of a step (all but tensors), recorded while it is traced and guarded afterwards.

    attributes of modules    seen by a subclass with its own `__getattribute__` that every module has for that time
    attributes of the trainer    likewise; those that change in ways nobody can compare are refused
    globals, class attributes    those that the code names that was seen to run
    closures, helper objects, containers    behind the values of these (`snapshots`)

`state_slots` lists all that a step might change, whether it reads it or not.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture.python.places import ABSENT, Answers, Asked, Place
from lightning_pipe.capture.python.state_slots import (
    HOOK_TABLES,
    PYTHON_SCALARS,
    TORCHS_OWN,
    attribute_slot,
    attributes_of,
    class_slot,
    global_slots,
    has_state,
    module_classes,
    owners_of,
)
from lightning_pipe.capture.python.users_code import (
    forget_cached,
    functions_in,
    functions_of,
    is_library,
    is_users,
    names_in,
)
from lightning_pipe.capture.tracked.tracked_number import is_tracked
from lightning_pipe.errors import CaptureError
from lightning_pipe.lightning_names import pl

_TORCHS_TABLES = ("_modules", *HOOK_TABLES)


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
    def recording(self, *, code: bool = True) -> Iterator[None]:
        """Record inside what is read of modules and the trainer, and which code runs, if wanted."""
        with contextlib.ExitStack() as stack:
            stack.callback(forget_cached, self._codes)
            for path, owner in owners_of(self._module):
                if not stack.enter_context(_other_class(owner, self._methods(path, owner))):
                    self._names.update({(id(vars(owner)), name): (path, owner) for name in attributes_of(owner)})
            trainer = self._module._trainer
            if isinstance(trainer, pl.Trainer):
                stack.enter_context(_other_class(trainer, {"__getattribute__": self._trainers(type(trainer))}))
            if code:
                stack.enter_context(self.following_code())
            yield

    @property
    def codes(self) -> tuple[types.CodeType, ...]:
        """Return the code that was seen to run."""
        return tuple(self._codes)

    def is_fresh(self, slot: Place) -> bool:
        """Return whether the step gave a module's attribute a value before it read it, if it did."""
        return (id(slot.container), slot.key) in self._written_first or (
            (id(slot.container), slot.key) not in self._names
        )

    def slots(self) -> Iterator[Place]:
        """List the places that were read, and the tables of the modules that decide what a call does."""
        for (_, name), (path, owner) in self._names.items():
            cls = next((cls for cls in type(owner).__mro__ if name in vars(cls)), None)
            if name not in vars(owner) and cls is not None:
                if is_users(cls) or name == "forward":  # an attribute of the object would be in its way
                    yield attribute_slot(path, owner, name)
            elif not any(name in vars(owner)[table] for table in ("_parameters", "_buffers", "_modules")):
                yield attribute_slot(path, owner, name)
        yield from self._of_classes()
        for path, owner in owners_of(self._module):
            yield from (attribute_slot(path, owner, table) for table in _TORCHS_TABLES)
        for name in self._of_trainer:
            yield Place(_Attributes(self._module._trainer), name, f"self.trainer.{name}")
        yield from global_slots(self._codes.items())
        if any(_ENVIRONMENT.intersection(code.co_names) for code in self._codes):
            yield Place(_Environment(), "environ", "os.environ")
        yield from self._of_optimizers()

    def _of_optimizers(self) -> Iterator[Place]:
        """List what optimizers keep besides parameters and numbers, if the code reads that; numbers are tracked."""
        if any("param_groups" in names_in(code) for code in self._codes):
            for o, optimizer in enumerate(getattr(self._module._trainer, "optimizers", ())):
                for g, group in enumerate(optimizer.param_groups):
                    place = Asked({"": partial(_untracked, group)})
                    yield Place(place, "", f"optimizers[{o}].param_groups[{g}]")

    def _of_classes(self) -> Iterator[Place]:
        """List attributes of the modules' classes that the code names, and its own functions there."""
        names = {name for code in self._codes for name in names_in(code)} | {name for _, name in self._names}
        classes = module_classes(self._module)
        known = {name for cls in classes for name in vars(cls)}
        for cls in classes:
            for name in known:
                value = vars(cls).get(name)
                is_run = any(function.__code__ in self._codes for function in functions_in(value))
                if (name in names or is_run) and has_state(name, value):
                    yield class_slot(cls, name)

    def _methods(self, path: str, owner: nn.Module) -> Mapping[str, Any]:
        cls, names, written = type(owner), self._names, self._written_first
        hidden = frozenset(vars(owner)) - frozenset(attributes_of(owner)) | TORCHS_OWN
        identity = id(vars(owner))
        read, write = cls.__getattribute__, cls.__setattr__

        def __getattribute__(self: Any, name: str) -> Any:
            if name not in hidden and not name.startswith("__") and (identity, name) not in written:
                names.setdefault((identity, name), (path, owner))
            if name == "__dict__" and not is_library(sys._getframe(1).f_code.co_filename):
                for any_name in attributes_of(owner):
                    names.setdefault((identity, any_name), (path, owner))
            return read(self, name)

        def __setattr__(self: Any, name: str, value: Any) -> None:
            if (identity, name) not in names:
                written.add((identity, name))
            write(self, name, value)

        return {"__getattribute__": __getattribute__, "__setattr__": __setattr__}

    def _trainers(self, cls: type) -> Callable[[Any, str], Any]:
        def __getattribute__(trainer: Any, name: str) -> Any:
            try:
                value = object.__getattribute__(trainer, name)
            except AttributeError:
                self._of_trainer.setdefault(name)
                raise
            if name.startswith("__") or is_library(sys._getframe(1).f_code.co_filename) or callable(value):
                return value
            if (isinstance(value, PYTHON_SCALARS) or name == "callbacks") and not is_tracked(value):
                self._of_trainer.setdefault(name)
            elif name not in _KEPT_BY_TRAINER and not is_tracked(value):
                self._refuse(f"it reads trainer.{name}, which may change from step to step")
            return value

        return __getattribute__

    @contextlib.contextmanager
    def following_code(self) -> Iterator[None]:
        """Note the code of every function that is called inside in this thread, but for libraries."""
        codes = self._codes
        begun: dict[int, types.FrameType] = {}

        before = sys.gettrace()

        def note(frame: types.FrameType, event: Any, argument: Any) -> Any:
            code = frame.f_code
            others = None if before is None else before(frame, event, argument)
            if is_library(code.co_filename):
                return others
            codes.setdefault(code, frame.f_globals)
            for function in _of_backward(frame):  # on an accelerator a thread runs it that nobody follows
                codes.setdefault(function.__code__, function.__globals__)
            if code.co_flags & inspect.CO_GENERATOR:
                if id(frame) not in begun and _is_resumed(frame):
                    self._refuse(f"it advances the generator {code.co_name}, which remembers where it is (state)")
                begun[id(frame)] = frame
            return others

        sys.settrace(note)
        try:
            yield
        finally:
            sys.settrace(before)


def _of_backward(frame: types.FrameType) -> Iterator[types.FunctionType]:
    """Yield the functions of the user's `autograd.Function` whose forward a frame is."""
    code = frame.f_code
    context = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if isinstance(context, torch.autograd.function.FunctionCtx):
        owner = next((cls for cls in type(context).__mro__ if "_forward_cls" in vars(cls)), None)
        if owner is not None:
            yield from functions_of(vars(owner)["_forward_cls"])


def _is_resumed(frame: types.FrameType) -> bool:
    """Return whether the frame of a generator has yielded before."""
    at = frame.f_lasti
    return frame.f_code.co_code[at] == dis.opmap["RESUME"] and frame.f_code.co_code[at + 1] & 3 != 0


def _untracked(group: Mapping[str, Any]) -> tuple[Any, ...]:
    number = ABSENT
    return tuple((k, number if type(v) in (int, float) else v) for k, v in group.items() if k != "params")


# what a step reads of the trainer that stays, or whose numbers are tracked
_KEPT_BY_TRAINER = frozenset(
    "optimizers lr_scheduler_configs strategy accelerator logger loggers model lightning_module".split()
)


_ENVIRONMENT = frozenset({"environ", "getenv"})


class _Environment(Answers):
    """The variables of the environment as one value."""

    def __getitem__(self, name: str) -> Any:
        return tuple(sorted(getattr(os, name).items()))


class _Attributes(Answers):
    """The attributes of an object, properties too, as a dict that is only read."""

    def __init__(self, owner: Any) -> None:
        super().__init__()
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None


def _subclass(cls: type, space: dict[str, Any]) -> type:
    """Return a subclass of which the class does not hear, as it might register it."""
    own = vars(cls).get("__init_subclass__")
    type.__setattr__(cls, "__init_subclass__", classmethod(lambda _: None))
    try:
        return type(cls.__name__, (cls,), space)
    finally:
        if own is None:
            type.__delattr__(cls, "__init_subclass__")
        else:
            type.__setattr__(cls, "__init_subclass__", own)


@contextlib.contextmanager
def _other_class(owner: Any, methods: Mapping[str, Any]) -> Iterator[bool]:
    """Give an object a subclass of its class for a while; what is yielded says whether that is possible."""
    cls = type(owner)
    if isinstance(owner, torch.jit.ScriptModule):
        yield False
        return
    space = {**methods, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    try:
        subclass = _subclass(cls, space)
        own = frozenset(vars(subclass))
        object.__setattr__(owner, "__class__", subclass)
    except TypeError:  # a class with a layout of its own cannot be swapped
        yield False
        return
    try:
        yield True
    finally:
        object.__setattr__(owner, "__class__", cls)
    for name in vars(subclass).keys() - own:  # what was meant for its class: `type(self).name = ...`
        if name not in vars(cls):
            raise CaptureError(f"The step gives {cls.__name__} the new class attribute {name}. Define it in the class.")
        setattr(cls, name, vars(subclass)[name])
