"""Optimizer of one rank made from the user's, and its state made that of one device.

Groups and their parameters stay as they are. Parameters that this rank does not hold are stand-ins, which never have a
gradient, so that the optimizer passes over them. Learning-rate schedulers, callbacks that
add groups, and the numbers that a checkpoint gives to parameters are those of one device.
"""

from __future__ import annotations

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
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

_TORCH = f"{Path(torch.__file__).parent}/"


class Groups:
    """The parameter groups of one optimizer on this rank.

    Args:
        optimizer: the user's optimizer over the whole module.
        weights: where parameters live.
    """

    def __init__(self, optimizer: Optimizer, weights: Weights) -> None:
        self._optimizer = optimizer
        self._weights = weights
        self._has_warned = False
        optimizer.register_state_dict_post_hook(self._say_what_is_missing)

    def _say_what_is_missing(self, *_: Any) -> None:
        """Warn once where code of the user asks for state that other ranks have."""
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if self._has_warned or is_library(frame.f_code.co_filename):
            return
        steppers, rank = self._weights.steppers(), self._weights.control.rank
        missing = [name for name in self.names() if rank not in steppers.get(name, (rank,))]
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

    def follow(self) -> None:
        """Drop the state of parameters that other ranks step now."""
        self._forget_elsewhere()

    def bring(self, before: Mapping[str, tuple[int, ...]], *, control: ControlPlane) -> None:
        """Have the state of parameters that this rank steps now, and others stepped before; on all ranks together.

        What this rank steps no more it gives up before its device gets the rest.

        Args:
            before: ranks that stepped a parameter, by its name.
            control: to the other ranks.
        """
        state, device, now = self._optimizer.state, self._weights.device, self._weights.steppers()
        waiting: dict[torch.Tensor, Any] = {}
        for parameter in self.parameters():
            name = self._weights.name_of(parameter)
            if name is None or {*now[name]} <= {*before[name]}:
                continue
            source = before[name][0]
            mine = _sent(state.get(parameter), device) if control.rank == source else None
            brought = control.broadcast(mine, source=source, what=f"the optimizer state of {name}")
            if brought is not None and control.rank in {*now[name]} - {*before[name]}:
                waiting[parameter] = brought
        self._forget_elsewhere()
        for parameter, brought in waiting.items():
            state[parameter] = _received(brought, device)

    def parameters(self) -> list[torch.Tensor]:
        """List all parameters, real ones and stand-ins, in the order of the groups."""
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def gather(
        self, control: ControlPlane, *, placed: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> dict[str, Any]:
        """Return the state of the whole optimizer on rank 0, as on one device; on other ranks their own part.

        Args:
            control: to the other ranks.
            placed: returns what rank 0 keeps of a tensor that comes from another rank; None for the tensor itself.
        """
        local = self._optimizer.state_dict()
        states = dict(local["state"])
        for index, parameter in enumerate(self.parameters()):
            name = self._weights.name_of(parameter)
            source = self._weights.owner(name) if name is not None else 0
            own = _on_host(states.get(index)) if source != 0 else None
            brought = control.to_first(own, source=source, what=f"the optimizer state of {name}")
            if brought is not None:
                if placed is not None and source != control.rank:
                    brought = apply_to_collection(brought, torch.Tensor, placed)
                states[index] = brought
        return {**local, "state": {key: states[key] for key in sorted(states, key=_in_order)}}

    def part(self, rank: int) -> dict[str, Any]:
        """Return the state of the optimizer for the parameters whose state on this rank counts."""
        local = self._optimizer.state_dict()
        names = [self._weights.name_of(parameter) for parameter in self.parameters()]
        owners = [self._weights.owner(name) if name is not None else 0 for name in names]
        own = {key for key, owner in enumerate(owners) if owner == rank}
        state = {k: value for k, value in local["state"].items() if k in own or (rank == 0 and not isinstance(k, int))}
        return {**local, "state": state}

    def names(self) -> list[str]:
        """Return the names of all parameters, in the order of the groups."""
        found = [self._weights.name_of(parameter) for parameter in self.parameters()]
        return [f"#{number}" if name is None else name for number, name in enumerate(found)]

    def load(self, whole: dict[str, Any]) -> None:
        """Load the state of a whole optimizer for the parameters that are stepped here; the rest is not read."""
        saved = [number for group in whole["param_groups"] for number in group["params"]]
        elsewhere = {number for number, here in zip(saved, self.parameters(), strict=False) if not self._here(here)}
        state = {key: _read(values) for key, values in whole["state"].items() if key not in elsewhere}
        self._optimizer.load_state_dict({**whole, "state": state})
        self._forget_elsewhere()

    def _forget_elsewhere(self) -> None:
        for parameter in [p for p in self._optimizer.state if isinstance(p, torch.Tensor) and not self._here(p)]:
            del self._optimizer.state[parameter]

    def _here(self, parameter: torch.Tensor) -> bool:
        name = self._weights.name_of(parameter)
        return name is None or self._weights.steps(name)


def _in_order(key: Any) -> tuple[bool, Any]:
    """Sort numbers of parameters before other keys, which stay as they are."""
    return (False, key) if isinstance(key, int) else (True, 0)


def _read(state: Any) -> Any:
    """Return a state with tensors of its own, which does not depend on the file that it comes from."""
    return apply_to_collection(state, torch.Tensor, torch.Tensor.clone)


@dataclass(frozen=True)
class _OnDevice:
    """A tensor on its way from the device where one rank computes to that of another."""

    on_host: torch.Tensor


def _sent(state: Any, device: torch.device) -> Any:
    def sent(tensor: torch.Tensor) -> Any:
        return _OnDevice(tensor.detach().cpu()) if tensor.device == device else tensor.detach()

    return apply_to_collection(state, torch.Tensor, sent)


def _received(state: Any, device: torch.device) -> Any:
    return apply_to_collection(state, _OnDevice, lambda one: one.on_host.to(device))


def _on_host(state: Any) -> Any:
    return apply_to_collection(state, torch.Tensor, lambda tensor: tensor.detach().cpu())
