"""Reads of the trainer and of what it reaches: optimizers, schedulers and their settings, the strategy, loggers.

Lightning replaces what these hold (`load_state_dict` puts new groups into an optimizer), so every place is looked for
through its owner whenever it is compared. An owner is compared with what the trainer has then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lightning_pipe.capture.introspection.attribute_access import AttributeAccess, Read
from lightning_pipe.capture.python.places import ABSENT, Place, asked_place
from lightning_pipe.capture.python.state_slots import PYTHON_SCALARS, optimizers_of
from lightning_pipe.capture.python.users_code import is_library, is_ours
from lightning_pipe.capture.tracked.tracked_number import is_tracked

_OPTIMIZERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_GUARDED = ("strategy", "accelerator")  # what the step's own code reads of them
# what a step reads of the trainer that stays, or whose parts are guarded
_KEPT_BY_TRAINER = frozenset("optimizers lr_scheduler_configs logger loggers model lightning_module".split()) | {
    *_GUARDED
}


class TrainerReads:
    """Record what is read of a trainer while a step is traced.

    Args:
        refuse: raises for what cannot be guarded, given what it is.
    """

    def __init__(self, refuse: Callable[[str], Any]) -> None:
        self._refuse = refuse
        self._trainer: Any = None
        self._names: dict[str, None] = {}
        self._of_owners: dict[tuple[int, str], tuple[str, Any]] = {}  # attribute -> path of its owner, owner

    def listen(self, access: AttributeAccess, trainer: Any) -> None:
        """Note reads until the access ends."""
        self._trainer = trainer
        access.listen(trainer, self._reads)
        for path, owner in optimizers_of(trainer):
            self._listen_to(access, path, owner, by_libraries=True)
        loggers = [(f"loggers[{number}]", logger) for number, logger in enumerate(trainer.loggers)]
        for path, owner in (*((name, getattr(trainer, name)) for name in _GUARDED), *loggers):
            self._listen_to(access, path, owner, by_libraries=False)

    def places(self) -> Iterator[Place]:
        """List the places that were read."""
        trainer = self._trainer
        for name in self._names:
            yield asked_place(f"self.trainer.{name}", partial(getattr, trainer, name, ABSENT))
        if self._of_owners:
            yield asked_place(
                "self.trainer.optimizers", lambda: tuple(id(owner) for _, owner in optimizers_of(trainer))
            )
        for (_, name), (path, owner) in self._of_owners.items():
            yield asked_place(f"{path}.{name}", partial(_without_numbers, owner, name))

    def _reads(self, read: Read, trainer: Any, name: str) -> Any:
        try:
            value = read(trainer, name)
        except AttributeError:
            self._names.setdefault(name)
            raise
        if name.startswith("__") or is_library(sys._getframe(2).f_code.co_filename) or callable(value):
            return value
        if (isinstance(value, PYTHON_SCALARS) or name == "callbacks") and not is_tracked(value):
            self._names.setdefault(name)
        elif name not in _KEPT_BY_TRAINER and not is_tracked(value):
            self._refuse(f"it reads trainer.{name}, which may change from step to step")
        return value

    def _listen_to(self, access: AttributeAccess, path: str, owner: Any, *, by_libraries: bool) -> None:
        """Note what is read of an object that the trainer reaches, and of optimizers and schedulers inside it.

        Args:
            access: of all objects that are listened to.
            path: of the object, as the user would write it.
            owner: the object.
            by_libraries: whether reads by the code of libraries count, such as its own methods.
        """

        def note(name: str) -> None:
            self._of_owners.setdefault((id(owner), name), (path, owner))

        def reads(read: Read, known: Any, name: str) -> Any:
            frame = sys._getframe(2)
            if is_ours(frame.f_code.co_filename) and not by_libraries and frame.f_back is not None:
                frame = frame.f_back  # behind the stand-in of a logger
            reader = frame.f_code.co_filename
            is_noted = not (is_ours(reader) if by_libraries else is_library(reader))
            try:
                value = read(known, name)
            except AttributeError:
                if is_noted and not name.startswith("__"):
                    note(name)
                raise
            if name == "__dict__" and not is_library(reader):
                for any_name in (name, *value):
                    note(any_name)
            elif is_noted and not name.startswith("__") and not callable(value):
                note(name)
                for inner in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(inner, _OPTIMIZERS) and not access.is_known(inner):
                        self._listen_to(access, f"{path}.{name}", inner, by_libraries=True)
            return value

        access.listen(owner, reads)


def _without_numbers(owner: Any, name: str) -> Any:
    """Return an attribute without parameters and numbers that are tracked; optimizers and schedulers by identity."""
    value: Any = getattr(owner, name, ABSENT)
    if value is ABSENT:
        return value
    match name:
        case "param_groups":
            return tuple(tuple((k, _untracked(v)) for k, v in group.items() if k != "params") for group in value)
        case "_last_lr":
            return tuple(map(_untracked, value))
        case "state":  # a step that reads it is refused
            return ABSENT
        case "__dict__":
            return (*value,)
        case "last_epoch":
            return _untracked(value)
    if isinstance(value, (list, tuple)) and any(isinstance(item, _OPTIMIZERS) for item in value):
        return tuple(map(id, value))
    return str(id(value)) if isinstance(value, _OPTIMIZERS) else value


def _untracked(value: Any) -> Any:
    return ABSENT if type(value) in (int, float) else value
