"""Python state that a step, its first call or hooks leave, put on the module of this rank, for good or for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import assert_never

from lightning_pipe.capture.python.inner_states import set_state, state_of
from lightning_pipe.capture.python.places import ABSENT, Place, follow
from lightning_pipe.capture.steps.record import KeptState
from lightning_pipe.capture.steps.trees import mapped
from lightning_pipe.errors import PipelineError
from lightning_pipe.lightning_names import pl


def keep_state(kept: KeptState, value: Any, module: pl.LightningModule) -> None:
    """Leave on the module of this rank what a step has left behind.

    Raises:
        PipelineError: if it is not known where.
    """
    if not kept.path:
        raise PipelineError(
            f"The step changes {kept.name} in this batch, which can neither be put back for the next micro-batch nor "
            "found by other ranks. Keep numbers, lists or dicts on the module instead."
        )
    slot = follow(module, kept.path)
    match kept.how:
        case "assign":
            slot.write(value)
        case "remove":
            slot.write(ABSENT)
        case "extend":
            slot.read().extend(value)
        case "refill":
            collection = slot.read()
            collection.clear()
            (collection.update if isinstance(collection, set | dict) else collection.extend)(value)
        case "update":
            slot.read().update(value)
        case "state":
            set_state(slot.read(), value)
        case _:
            assert_never(kept.how)


def keep_told(change: KeptState, module: pl.LightningModule, device: torch.device) -> None:
    """Leave on the module of this rank what another rank has told; its tensors go to a device."""
    keep_state(change, mapped(change.value, torch.Tensor, lambda tensor: tensor.to(device)), module)


def keep_all(
    changes: Sequence[KeptState], module: pl.LightningModule, device: torch.device
) -> contextlib.ExitStack[bool | None]:
    """Leave changes on the module of this rank, their tensors on a device; what is returned undoes them when closed."""
    undo = contextlib.ExitStack()
    for change in changes:
        undo.callback(_undoing(follow(module, change.path), change))
        keep_told(change, module, device)
    return undo


class SettledState:
    """Changes of Python state that rank 0 has found to settle, each of which may be left on the module of this rank.

    Args:
        changes: their tensors are on the host.
        module: the module of this rank.
        device: where their tensors go.
    """

    def __init__(self, changes: Sequence[KeptState], module: pl.LightningModule, device: torch.device) -> None:
        self._changes = list(changes)
        self._module, self._device = module, device
        self._undo = contextlib.ExitStack()

    def keep(self, name: str) -> bool:
        """Leave the changes of a state, or inside it, on the module; return whether there are any."""
        inside = [one for one in self._changes if one.name == name or one.name.startswith((f"{name}[", f"{name}."))]
        self._changes = [one for one in self._changes if all(one is not other for other in inside)]
        self._undo.push(keep_all(inside, self._module, self._device))
        return bool(inside)

    def undo(self) -> None:
        """Undo what was left."""
        self._undo.close()


def _undoing(slot: Place, change: KeptState) -> Callable[[], object]:
    """Return what undoes a change that is about to be made."""
    now: Any = slot.read()
    match change.how:
        case "assign" | "remove":
            return partial(slot.write, now)
        case "extend":
            return partial(now.__delitem__, slice(len(now), None))
        case "state":
            return partial(set_state, now, state_of(now))
    content = dict(now) if isinstance(now, dict) else list(now)

    def refill() -> None:
        now.clear()
        (now.extend if hasattr(now, "extend") else now.update)(content)

    return refill
