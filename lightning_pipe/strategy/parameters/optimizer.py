"""Optimizer of one rank made from the user's, and its state made that of one device.

Groups and their parameters stay as they are. Parameters that this rank does not hold are stand-ins, which never have a
gradient, so that the optimizer passes over them. Learning-rate schedulers, callbacks that
add groups, and the numbers that a checkpoint gives to parameters are those of one device.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch.optim import Optimizer

from lightning_pipe.capture.python.users_code import is_library
from lightning_pipe.errors import UnsupportedError
from lightning_pipe.strategy import lightning_private as private
from lightning_pipe.strategy.parameters.inner_optimizers import (
    inner_optimizers,
    parameters_of,
    reachable,
    state_tables,
    with_tensors,
)
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

_TORCH = f"{Path(torch.__file__).parent}/"


class Groups:
    """The parameter groups and the state of one optimizer, and of those inside it, on this rank.

    Args:
        optimizer: the user's optimizer over the whole module.
        weights: where parameters live.
        is_movable: whether all that it keeps of a parameter is in its state tables.
    """

    def __init__(self, optimizer: Optimizer, weights: Weights, *, is_movable: bool = True) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._is_movable = is_movable
        self._has_warned = self._is_saving = False
        for inner in inner_optimizers(optimizer):
            with contextlib.suppress(AttributeError):  # its class does without the constructor of torch's
                inner.register_state_dict_post_hook(self._say_what_is_missing)

    def _say_what_is_missing(self, *_: Any) -> None:
        """Warn once where code of the user asks for state that other ranks have."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if self._has_warned or self._is_saving or is_library(frame.f_code.co_filename):
            return
        steppers, rank = self._weights.steppers(), self._weights.control.rank
        missing = [name for name in self.names().values() if rank not in steppers.get(name, (rank,))]
        if missing:
            self._has_warned = True
            warnings.warn(
                f"{frame.f_code.co_filename}:{frame.f_lineno} asks for the state of the optimizer. Rank {rank} has "
                f"that of the parameters that it steps, not of {missing[0]} and {len(missing) - 1} others. "
                "trainer.save_checkpoint(path), on all ranks, writes the whole state.",
                stacklevel=2,
            )

    @property
    def optimizer(self) -> Optimizer:
        """Return the user's optimizer."""
        return self._optimizer

    @property
    def has_own_state_dict(self) -> bool:
        """Return whether a class of the user's makes the state dict, which may read weights."""
        return any(type(inner).state_dict is not Optimizer.state_dict for inner in inner_optimizers(self._optimizer))

    def move(self, device: torch.device) -> None:
        """Have the state on a device."""
        for inner in inner_optimizers(self._optimizer):
            private.optimizer_to_device(inner, device)

    def follow(self) -> None:
        """Drop the state of parameters that other ranks step now."""
        for table in state_tables(self._optimizer):
            for parameter in [p for p in table if isinstance(p, torch.Tensor) and not self._here(p)]:
                del table[parameter]

    def bring(self, before: Mapping[str, tuple[int, ...]], *, control: ControlPlane) -> None:
        """Have the state of parameters that this rank steps now, and others stepped before; on all ranks together.

        What this rank steps no more it gives up before its device gets the rest.

        Args:
            before: ranks that stepped a parameter, by its name.
            control: to the other ranks.

        Raises:
            UnsupportedError: if the optimizer keeps more of a parameter than its state tables have.
        """
        device, now, tables = self._weights.device, self._weights.steppers(), state_tables(self._optimizer)
        waiting: dict[torch.Tensor, list[Any]] = {}
        for parameter in parameters_of(self._optimizer):
            name = self._weights.name_of(parameter)
            if name is None or {*now[name]} <= {*before[name]}:
                continue
            if not self._is_movable:
                raise UnsupportedError(
                    f"{type(self._optimizer).__name__} keeps more of {name} than optimizer.state[parameter] has, so "
                    f"rank {now[name][-1]} cannot step it from now on. Keep all of it there."
                )
            source = before[name][0]
            mine = _sent([table.get(parameter) for table in tables], device) if control.rank == source else None
            brought = control.broadcast(mine, source=source, what=f"the optimizer state of {name}")
            if brought is not None and control.rank in {*now[name]} - {*before[name]}:
                waiting[parameter] = brought
        self.follow()
        for parameter, brought in waiting.items():
            for table, entry in zip(tables, brought, strict=True):
                if entry is not None:
                    table[parameter] = _received(entry, device)

    def parameters(self) -> list[torch.Tensor]:
        """List all parameters, real ones and stand-ins, in the order of the groups."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def gather(
        self, control: ControlPlane, *, placed: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> dict[str, Any]:
        """Return the state of the whole optimizer on rank 0, as on one device; on other ranks their own part.

        The tables of rank 0 have the state of all parameters while the optimizer is asked for its state dict, which may
        be any tree.

        Args:
            control: to the other ranks.
            placed: returns what rank 0 keeps of a tensor that comes from another rank; None for the tensor itself.
        """
        brought: dict[torch.Tensor, list[Any]] = {}
        owned = self.owned()
        for parameter in parameters_of(self._optimizer):
            source = self._owner(parameter)
            own = _on_host(owned.get(parameter)) if source != 0 else None
            entries = control.to_first(own, source=source, what="the optimizer state of a parameter")
            if entries is not None and source != 0:
                brought[parameter] = with_tensors(entries, placed) if placed else entries
        return self.state_dict(brought) if control.rank == 0 else self.local_state()

    def owned(self) -> dict[torch.Tensor, list[Any]]:
        """Return the state of the parameters whose state on this rank counts, by table; None where there is none."""
        rank, tables = self._weights.control.rank, state_tables(self._optimizer)
        mine = [parameter for parameter in parameters_of(self._optimizer) if self._owner(parameter) == rank]
        return {parameter: [table.get(parameter) for table in tables] for parameter in mine}

    def local_state(self) -> dict[str, Any]:
        """Return the state dict of this rank, for hooks that look at it; an empty one where it needs other ranks'."""
        try:
            return self.state_dict({})
        except Exception:  # of the user's own class
            return {"state": {}, "param_groups": []}

    def state_dict(self, brought: Mapping[torch.Tensor, list[Any]]) -> dict[str, Any]:
        """Return the optimizer's state dict, with this state of other ranks' parameters in the tables."""
        tables, parameters = state_tables(self._optimizer), parameters_of(self._optimizer)
        local = [dict(table) for table in tables]
        for number, (table, own) in enumerate(zip(tables, local, strict=True)):
            table.clear()  # to fill it in the order of one device
            for parameter in parameters:
                entry = brought[parameter][number] if parameter in brought else own.get(parameter)
                if entry is not None:
                    table[parameter] = entry
            table.update({key: value for key, value in own.items() if not isinstance(key, torch.Tensor)})
        self._is_saving = True
        try:
            return self._optimizer.state_dict()
        finally:
            self._is_saving = False
            for table, own in zip(tables, local, strict=True):
                table.clear()
                table.update(own)

    def names(self) -> dict[torch.Tensor, str]:
        """Return the names of all parameters."""
        found = ((p, self._weights.name_of(p)) for p in parameters_of(self._optimizer))
        return {p: f"#{number}" if name is None else name for number, (p, name) in enumerate(found)}

    def load(self, whole: Mapping[str, Any]) -> None:
        """Load the state of a whole optimizer for the parameters that are stepped here; the rest is not read."""
        everyone = inner_optimizers(self._optimizer)
        if len(everyone) == 1 and {"state", "param_groups"} <= whole.keys():  # whose class may call no hooks
            whole = self._only_here(self._optimizer, whole)
        with contextlib.ExitStack() as hooks:
            for inner in everyone:
                with contextlib.suppress(AttributeError):
                    hooks.callback(inner.register_load_state_dict_pre_hook(self._only_here).remove)
            self._optimizer.load_state_dict(_read_beside_states(whole))
        self.follow()
        in_file = {id(item) for item in reachable(whole)}
        for table in state_tables(self._optimizer):
            for key, entry in table.items():
                table[key] = with_tensors(entry, lambda x: _read(x) if id(x) in in_file else x)

    def _only_here(self, inner: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return a saved state without the parameters that other ranks step."""
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        parameters = (parameter for group in inner.param_groups for parameter in group["params"])
        elsewhere = {number for number, p in zip(numbers, parameters, strict=False) if not self._here(p)}
        return {**saved, "state": {key: entry for key, entry in saved["state"].items() if key not in elsewhere}}

    def _owner(self, parameter: torch.Tensor) -> int:
        name = self._weights.name_of(parameter)
        return 0 if name is None else self._weights.owner(name)

    def _here(self, parameter: torch.Tensor) -> bool:
        name = self._weights.name_of(parameter)
        return name is None or self._weights.steps(name)


def _read_beside_states(tree: Any) -> Any:
    """Return a state dict with tensors of its own, but for the states of parameters, of which a rank reads some."""
    if isinstance(tree, dict):
        states = {"state"} if "param_groups" in tree else set()
        return {key: value if key in states else _read_beside_states(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(map(_read_beside_states, tree))
    return apply_to_collection(tree, torch.Tensor, _read)


def _read(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own, which does not depend on the file that it comes from."""
    return tensor.clone()


@dataclass(frozen=True)
class _OnDevice:
    """A tensor on its way from the device where one rank computes to that of another."""

    on_host: torch.Tensor


def _sent(state: Any, device: torch.device) -> Any:
    def sent(tensor: torch.Tensor) -> Any:
        return _OnDevice(tensor.detach().cpu()) if tensor.device == device else tensor.detach()

    return with_tensors(state, sent)


def _received(state: Any, device: torch.device) -> Any:
    return with_tensors(state, lambda one: one.on_host.to(device), kind=_OnDevice)


def _on_host(state: Any) -> Any:
    return with_tensors(state, lambda tensor: tensor.detach().cpu())
