"""What may have changed since the loaders of a fit were asked for, before the hooks that one device runs first.

A plan needs the first batch, so `train_dataloader` is called before `on_fit_start` and the sanity check. If one of
these changes what the hook reads (`self.batch_size = 2`), or a limit of the trainer, the fit asks again when it begins.
What the call itself changes is not there until then (`EarlyCall`).
"""

from __future__ import annotations

import inspect
import types
from collections import deque
from copy import copy
from typing import Any

import numpy as np
import torch

from lightning_pipe.capture.python.users_code import Code, names_in, reached
from lightning_pipe.capture.recording.replay_state import same_content
from lightning_pipe.lightning_names import pl
from lightning_pipe.strategy.loading.untouched_data import NotedAttributes

_MOST = 1 << 20  # elements, or rows, that are looked through
_HOOK = "train_dataloader"
_LIMITS = ("limit_train_batches", "val_check_interval", "overfit_batches", "check_val_every_n_epoch")


class AskedEarly:
    """Loaders that were asked for, and what they were made of.

    Args:
        trainer: of a fit, just after it was asked.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._before = self._now()

    def changed(self) -> tuple[str, ...]:
        """Name what is not as it was."""
        now = self._now()
        return tuple(
            name for name in now if name not in self._before or not same_content(now[name], self._before[name])
        )

    def _now(self) -> dict[str, Any]:
        trainer: Any = self._trainer
        found = {f"trainer.{name}": getattr(trainer, name, None) for name in _LIMITS}
        for owner, path in ((trainer.lightning_module, "self"), (trainer.datamodule, "the data module's")):
            read = _read_by(owner, _HOOK)
            found |= {f"{path}.{n}": _content(value) for n, value in vars(owner or object).items() if n in read}
        return found


class EarlyCall:
    """What a call of `train_dataloader` changes, which is put by until the fit would call it.

    Hooks and the loaders of the sanity check come first on one device, and must not see it. If nothing that the call
    has changed is another thing then, its loaders are what a call would make, and the changes are made again.

    Args:
        trainer: of a fit, before the call.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._before = self._noted()
        self._after: list[NotedAttributes] = []

    def _noted(self) -> list[NotedAttributes]:
        known: Any = self._trainer
        owners = [owner for owner in (known.lightning_module, known.datamodule) if owner is not None]
        return [NotedAttributes(owner, _read_by(owner, _HOOK), _codes_of(owner, _HOOK)) for owner in owners]

    def put_back(self) -> None:
        """Undo what the call has changed."""
        for noted in self._before:
            noted.restore()

    def put_by(self) -> None:
        """Undo what the call has changed, until `redo`."""
        if not self._is_undone():
            self._after = self._noted()
            self.put_back()

    def changed(self) -> tuple[str, ...]:
        """Name what somebody else has changed since, if the call changes it too."""
        return ("what train_dataloader changes",) if self._after and not self._is_undone() else ()

    def redo(self) -> None:
        """Make the changes that were put by."""
        for noted in self._after:
            noted.restore()

    def _is_undone(self) -> bool:
        return all(noted.is_same() for noted in self._before)


def _codes_of(owner: Any, method: str) -> list[Code]:
    """Return the code of a method, and of other methods of its class that it names."""
    names = _read_by(owner, method) | {method}
    functions = (inspect.unwrap(f) for name in names if callable(f := getattr(type(owner), name, None)))
    return [(f.__code__, f.__globals__) for f in functions if isinstance(f, types.FunctionType)]


def _read_by(owner: Any, method: str) -> set[str]:
    """Return the names in a method, in other methods of its class that it names, and in functions that these name."""
    read, pending = set[str](), [method]
    while pending:
        function = getattr(type(owner), pending.pop(), None)
        function = inspect.unwrap(function) if callable(function) else function  # of torch.no_grad, say
        if isinstance(function, types.FunctionType):
            codes = reached([(function.__code__, function.__globals__)])
            named = {name for code, _ in codes for name in names_in(code)} - read
            pending += named
            read |= named
    return read


def _content(value: Any) -> Any:
    """Return what is in a value now, if that may change in place; another value itself."""
    if isinstance(value, torch.Tensor) and value.numel() <= _MOST:
        return value.detach().clone()
    is_small = isinstance(value, (np.ndarray, list, dict, set, deque)) and len(value) <= _MOST
    return copy(value) if is_small else value
