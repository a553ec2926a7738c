"""What may have changed since the loaders of a fit were asked for, before the hooks that one device runs first.

A plan needs the first batch, so `train_dataloader` is called before `on_fit_start` and the sanity check. If one of
these changes what the hook reads (`self.batch_size = 2`), or a limit of the trainer, the fit asks again when it begins.
"""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import torch

from lightning_pipe.capture.python.users_code import names_in
from lightning_pipe.capture.recording.replay_state import same_content
from lightning_pipe.lightning_names import pl
from lightning_pipe.strategy.loading.untouched_data import attributes_noted

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


def noted_for_asking(trainer: pl.Trainer) -> Callable[[], None]:
    """Note what `train_dataloader` may change; return what puts that back."""
    known: Any = trainer
    owners = [owner for owner in (known.lightning_module, known.datamodule) if owner is not None]
    actions = [attributes_noted(owner, _read_by(owner, _HOOK)) for owner in owners]

    def put_back() -> None:
        for action in actions:
            action()

    return put_back


def _read_by(owner: Any, method: str) -> set[str]:
    """Return the names in a method, and in other methods of its class that it names."""
    read, pending = set[str](), [method]
    while pending:
        function = getattr(type(owner), pending.pop(), None)
        function = inspect.unwrap(function) if callable(function) else function  # of torch.no_grad, say
        if isinstance(function, types.FunctionType):
            named = {*names_in(function.__code__)} - read
            pending += named
            read |= named
    return read


def _content(value: Any) -> Any:
    """Return what is in a value now, if that may change in place; another value itself."""
    if isinstance(value, torch.Tensor) and value.numel() <= _MOST:
        return value.detach().clone()
    is_small = isinstance(value, (np.ndarray, list, dict, set, deque)) and len(value) <= _MOST
    return copy(value) if is_small else value
