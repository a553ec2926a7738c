"""Python reads of a step (all but tensors), recorded while it is traced and guarded afterwards.

    attributes of modules    noticed by methods that their classes have for that time (`attribute_access`)
    attributes of the trainer    likewise; those that change in ways nobody can compare are refused
    attributes of optimizers and schedulers    likewise; what the trainer reaches is looked for at every comparison
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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pipe.capture.introspection.answered_types import AnsweredTypes
from lightning_pipe.capture.introspection.attribute_access import AttributeAccess, Read
from lightning_pipe.capture.python.places import Place, asked_place
from lightning_pipe.capture.python.state_slots import (
    HOOK_TABLES,
    TORCHS_OWN,
    attribute_slot,
    attributes_of,
    class_slot,
    global_slots,
    has_state,
    module_classes,
    owners_of,
)
from lightning_pipe.capture.python.trainer_reads import TrainerReads
from lightning_pipe.capture.python.users_code import (
    forget_cached,
    functions_in,
    functions_of,
    is_installed,
    is_library,
    is_users,
    names_in,
)
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
        self._whole: dict[str, nn.Module] = {}  # modules whose `__dict__` was read
        self._of_trainer = TrainerReads(refuse)
        self._codes: dict[types.CodeType, dict[str, Any]] = {}

    @contextlib.contextmanager
    def recording(self, *, code: bool = True) -> Iterator[None]:
        """Record inside what is read of modules and the trainer, and which code runs, if wanted."""
        access = AttributeAccess()
        with contextlib.ExitStack() as stack:
            stack.callback(forget_cached, self._codes)
            stack.enter_context(_no_new_attributes({type(owner) for _, owner in owners_of(self._module)}))
            stack.enter_context(access.listening())
            for path, owner in owners_of(self._module):
                if isinstance(owner, torch.jit.ScriptModule) or not access.listen(owner, *self._listeners(path, owner)):
                    self._names.update({(id(vars(owner)), name): (path, owner) for name in attributes_of(owner)})
            trainer = self._module._trainer
            if isinstance(trainer, pl.Trainer):
                self._of_trainer.listen(access, trainer)
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
        owners = tuple(owner for _, owner in owners_of(self._module))
        yield asked_place("the hash of the modules' classes", partial(_kinds, owners))
        for path, owner in self._whole.items():
            yield asked_place(f"vars({f'self.{path}'.rstrip('.')})", partial(_names_of, owner))
        yield from self._of_trainer.places()
        yield from global_slots(self._codes.items())
        if any(_ENVIRONMENT.intersection(code.co_names) for code in self._codes):
            yield asked_place("os.environ", lambda: tuple(sorted(os.environ.items())))

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

    def _listeners(self, path: str, owner: nn.Module) -> tuple[Callable[[Read, Any, str], Any], Callable[[str], None]]:
        names, written = self._names, self._written_first
        hidden = frozenset(vars(owner)) - frozenset(attributes_of(owner)) | TORCHS_OWN
        identity = id(vars(owner))

        def reads(read: Read, module: Any, name: str) -> Any:
            if name not in hidden and not name.startswith("__") and (identity, name) not in written:
                names.setdefault((identity, name), (path, owner))
            if name == "__dict__" and not is_library(sys._getframe(2).f_code.co_filename):
                self._whole[path] = owner
                for any_name in attributes_of(owner):
                    names.setdefault((identity, any_name), (path, owner))
            return read(module, name)

        def writes(name: str) -> None:
            if (identity, name) not in names:
                written.add((identity, name))

        return reads, writes

    @contextlib.contextmanager
    def following_code(self) -> Iterator[None]:
        """Note the code of every function that is called inside in this thread, but for libraries.

        The user's functions are answered the classes of one device when they ask for `type(x)`.
        """
        codes, answered = self._codes, AnsweredTypes()
        begun: dict[int, types.FrameType] = {}
        before = sys.gettrace()

        def note(frame: types.FrameType, event: Any, argument: Any) -> Any:
            code = frame.f_code
            others = None if before is None else before(frame, event, argument)
            if is_library(code.co_filename):
                return others
            codes.setdefault(code, frame.f_globals)
            if not is_installed(frame.f_globals.get("__file__") or code.co_filename):  # dataclasses generate code
                answered.note(frame.f_globals)
            for function in _of_backward(frame):  # on an accelerator a thread runs it that nobody follows
                codes.setdefault(function.__code__, function.__globals__)
            if code.co_flags & inspect.CO_GENERATOR:
                if id(frame) not in begun and _is_resumed(frame):
                    self._refuse(f"it advances the generator {code.co_name}, which remembers where it is (state)")
                begun[id(frame)] = frame
            return others

        with answered.answering():
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


def _names_of(owner: nn.Module) -> tuple[str, ...]:
    return (*attributes_of(owner),)


def _kinds(modules: tuple[nn.Module, ...]) -> int:
    """Return a number that is another one when a module has got another class, or other attributes as a whole."""
    return hash((tuple(map(type, modules)), tuple(map(id, map(vars, modules)))))


_ENVIRONMENT = frozenset({"environ", "getenv"})


@contextlib.contextmanager
def _no_new_attributes(classes: Iterable[type]) -> Iterator[None]:
    """Refuse what the code inside gives to classes that do not have it: no place is known that it could change.

    Raises:
        CaptureError: naming the first one.
    """
    known = {cls: frozenset(vars(cls)) for cls in classes}
    try:
        yield
    finally:
        added = [(cls, name) for cls, names in known.items() for name in vars(cls).keys() - names]
        for cls, name in added:
            type.__delattr__(cls, name)
    for cls, name in added:
        raise CaptureError(f"The step gives {cls.__name__} the new class attribute {name}. Define it in the class.")
