"""Weights in hooks: code of the user between two steps gets the values of all parameters when it touches some.

An average of a teacher, a histogram, samples from a decoder: all ranks run such code, and come to parameters that only
some of them hold. At the first operation on the values of one, all ranks meet and exchange what they lack; until the
next step every rank has the whole module, as inside `whole_module()`. What all ranks write stays, where it is held.
Code that touches nothing of the kind costs no exchange.

    rank 0   hook: teacher[0] ---+                       +--- teacher[1] ... --- next step
    rank 1   hook: teacher[0] ---+-- values both ways ---+--- teacher[1] ... --- gives up what it does not hold

Ranks do not meet for code that one of them may run alone, which finds stand-ins as ever (`AbsentError`): of
`rank_zero_only`, of loggers, of data loading, and whatever follows a question for the rank in the same hooks.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_pipe.capture.steps.hazards import user_line
from lightning_pipe.capture.torch_private import is_innermost
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.strategy.parameters.stand_ins import (
    BufferStandIn,
    Guarded,
    StandIn,
    concerns_values,
    is_asked_by_a_hook,
)
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.start.room import room_bytes
from lightning_pipe.units import format_bytes

_PACKAGE, _TORCH = f"{Path(__file__).parents[2]}/", f"{Path(torch.__file__).parent}/"
_BETWEEN = f"{_PACKAGE}strategy/parameters/stand_ins.py"
_CALL_HOOKS = frozenset(
    """_call_lightning_module_hook _call_lightning_datamodule_hook _call_callback_hooks _call_callbacks_state_dict
    _call_callbacks_on_save_checkpoint _call_callbacks_on_load_checkpoint""".split()
)
_LIGHTNING = ("/lightning/pytorch/", "/lightning/fabric/", "/pytorch_lightning/", "/lightning_fabric/")
_OF_ONE_RANK = (
    "/rank_zero.py",
    *(f"/{logger}/" for logger in ("tensorboard", "tensorboardX", "wandb", "mlflow", "comet_ml", "neptune", "clearml")),
)
_ON_LOADED = frozenset("on_before_batch_transfer transfer_batch_to_device on_after_batch_transfer".split())
_RANKS = frozenset("global_rank local_rank node_rank is_global_zero".split())


class WeightsInHooks(TorchFunctionMode):
    """Watch what the user's code does between steps, and let ranks meet where it touches what some of them lack.

    Args:
        weights: of this rank.
        whole: gives every rank the whole module inside; called on all ranks together.
    """

    def __init__(self, weights: Weights, whole: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._weights, self._whole = weights, whole
        self._depth = 0  # of calls of the strategy
        self._is_watching = self._is_pushed = self._is_over = False
        self._partial: frozenset[int] = frozenset()  # tensors that other ranks lack, by id
        self._filled: contextlib.ExitStack | None = None  # while every rank has all values
        self._gradients: dict[int, torch.Tensor | None] = {}  # stand-ins, of parameters that were filled, by id
        self._has_asked = False  # for its rank, since the last step
        self._told: set[str] = set()

    def begin(self) -> None:
        """Watch from now on, whenever the strategy does not run."""
        self._watch()

    def end(self) -> None:
        """Watch no more, and give up what was lent."""
        self._is_over = True
        self._rest()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Let the strategy run inside, for which every rank has what it holds."""
        self._depth += 1
        if self._depth == 1:
            self._rest()
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth and not self._is_over:
                self._watch()

    @contextlib.contextmanager
    def between(self) -> Iterator[None]:
        """Let hooks run inside that the strategy calls."""
        depth, self._depth = self._depth, 0
        if not self._is_over:
            self._watch()
        try:
            yield
        finally:
            self._depth = depth
            if depth:
                self._rest()

    def note_question(self) -> None:
        """Note that somebody asks for the rank: code of the user may do then what other ranks do not."""
        if self._is_watching and not self._has_asked:
            frame = sys._getframe(1)
            while frame.f_back is not None and (frame.f_code.co_name in _RANKS or _is_ours(frame.f_code.co_filename)):
                frame = frame.f_back
            path = frame.f_code.co_filename
            self._has_asked = not (_is_ours(path) or _is_lightnings(path))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let ranks meet before the first call that concerns values which some rank lacks."""
        kwargs = kwargs or {}
        if not self._is_watching:
            return func(*args, **kwargs)
        if self._filled is None:
            if self._has_partial(args, kwargs) and concerns_values(func, args) and self._may_meet():
                self._fill()
        elif self._gradients and _is_of_gradient(func) and (number := id(args[0])) in self._gradients:
            if func.__name__ == "__get__":
                return self._gradients[number] if is_asked_by_a_hook() else None
            self._gradients[number] = None
        if self._filled is not None:
            args, kwargs = self._present(args), self._present(kwargs)
        return func(*args, **kwargs)

    def _watch(self) -> None:
        self._partial = self._weights.partial()
        if self._partial:
            self._is_watching, self._has_asked = True, False
            if not self._is_pushed:
                self.__enter__()  # type: ignore[no-untyped-call]  # torch's modes have no types
                self._is_pushed = True

    def _rest(self) -> None:
        self._is_watching = False
        if self._is_pushed and is_innermost(self):  # else another mode was entered in a hook, and is still there
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_pushed = False
        if self._filled is not None:
            filled, self._filled = self._filled, None
            with torch.inference_mode(False):
                filled.close()
            for parameter in self._weights.parameters.values():
                if isinstance(parameter, StandIn):
                    parameter.gradient = self._gradients.get(id(parameter))
            self._gradients = {}

    def _has_partial(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        return any(
            isinstance(value, (StandIn, BufferStandIn)) or id(value) in self._partial
            for value in _flat((*args, *kwargs.values()))
        )

    def _may_meet(self) -> bool:
        """Return whether all ranks come here: to code of the user in a hook, which does not know its rank."""
        frame, is_users = sys._getframe(2), False
        while frame is not None and not self._has_asked:
            path, name = frame.f_code.co_filename, frame.f_code.co_name
            if path.startswith(_TORCH):
                if "/tensorboard/" in path:
                    return False
            elif _is_lightnings(path):
                if not is_users or name in _CALL_HOOKS:
                    return is_users
            elif path != _BETWEEN:
                if _is_ours(path) or name in _ON_LOADED or any(part in path for part in _OF_ONE_RANK):
                    return False
                is_users = True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def _fill(self) -> None:
        """Give every rank all values, unless one has no room for them."""
        line, missing, control = user_line(3), self._weights.missing_bytes(), self._weights.control
        with torch.inference_mode(False), torch.no_grad():
            lacks_room = torch.tensor(float(missing > _free_bytes(self._weights.device)))
            if control.sum(lacks_room, what=f"the values of all parameters, for {line} (all ranks must come there)"):
                return
            if line not in self._told:
                self._told.add(line)
                amount = f"{format_bytes(missing)} of {format_bytes(self._weights.all_bytes())}"
                rank_zero_warn(
                    f"{line} reads or writes parameters that other ranks hold, so all ranks get the whole module "
                    f"there, until the next step ({amount} come from other ranks here). With "
                    "trainer.strategy.whole_module() the code says so itself; under a layout of replicas alone nothing "
                    "is exchanged."
                )
            self._gradients = {id(p): p.gradient for p in self._weights.parameters.values() if isinstance(p, StandIn)}
            self._filled = contextlib.ExitStack()
            self._filled.enter_context(self._whole())

    def _present(self, value: Any) -> Any:
        """Return arguments with the buffers in the place of stand-ins that somebody has kept."""
        if isinstance(value, BufferStandIn):
            return self._weights.buffers[value.absence.name.removeprefix("the buffer ")]
        if isinstance(value, (tuple, list)) and any(isinstance(one, Guarded) for one in _flat(value)):
            return type(value)(self._present(one) for one in value)
        if isinstance(value, dict):
            return {name: self._present(one) for name, one in value.items()}
        return value


def _is_of_gradient(func: Any) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") == "grad"


def _flat(values: Any) -> Iterator[Any]:
    """Yield values, and those of lists among them: as deep as functions of torch look for tensors."""
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from value
        else:
            yield value


def _free_bytes(device: torch.device) -> int:
    """Return what a device has room for."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else room_bytes()


@functools.cache
def _is_ours(path: str) -> bool:
    return path.startswith(_PACKAGE)


@functools.cache
def _is_lightnings(path: str) -> bool:
    return any(part in path for part in _LIGHTNING)
