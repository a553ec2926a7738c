"""Weights in hooks: code of the user between two steps gets the values of all parameters when it touches some.

An average of a teacher, a histogram, samples from a decoder: all ranks run such code, and come to parameters that only
some of them hold. At the first operation on the values of one, all ranks meet and exchange what they lack; until the
next step every rank has the whole module, as inside `whole_module()`. What all ranks write stays, where it is held.
Code that touches nothing of the kind costs no exchange.

    rank 0   hook: teacher[0] ---+                       +--- teacher[1] ... --- next step
    rank 1   hook: teacher[0] ---+-- values both ways ---+--- teacher[1] ... --- gives up what it does not hold

Ranks do not meet for code that one of them may run alone, which finds stand-ins as ever (`AbsentError`): of
`rank_zero_only`, of loggers, of data loading, and whatever follows a question for the rank in the same hook. Nor do
they for `train()` and `eval()` of an optimizer, by which each rank changes the parameters that it steps.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_pipe.capture.python.users_code import is_lightnings
from lightning_pipe.capture.steps.hazards import user_line
from lightning_pipe.capture.torch_private import is_innermost, questions_for_rank_heard
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.strategy.lightning_private import calls_a_hook
from lightning_pipe.strategy.parameters.inner_optimizers import SWITCHES
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
_EXAMPLES = f"{_PACKAGE}examples/"  # are written as users write
_BETWEEN = f"{_PACKAGE}strategy/parameters/stand_ins.py"
_OF_ONE_RANK = (
    "/rank_zero.py",
    *(f"/{logger}/" for logger in ("tensorboard", "tensorboardX", "wandb", "mlflow", "comet_ml", "neptune", "clearml")),
)
_ITERATES = "/torch/utils/data/dataloader.py"  # asks for shuffles that ranks share
_BEFORE_ZEROING = "on_before_zero_grad"
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
        self._asked_in: types.FrameType | None = None  # the call of a hook that has asked for its rank, the last
        self._zeroing = False  # whether hooks precede the zeroing of gradients
        self._told: set[str] = set()
        self._undo = contextlib.ExitStack()

    def begin(self, hooks: Sequence[str]) -> None:
        """Watch from now on, whenever the strategy does not run, if all ranks have the same hooks; on all together.

        Args:
            hooks: names of those that are the user's.
        """
        control = self._weights.control
        first = control.broadcast(hooks, source=0, what="which hooks there are")
        alike = control.sum(torch.tensor(float(bool(hooks) and hooks == first)), what="whether hooks are the same")
        self._zeroing = any(hook.endswith(_BEFORE_ZEROING) for hook in hooks)
        self._is_over = bool(alike < control.ranks)
        if not self._is_over:
            self._undo.enter_context(questions_for_rank_heard(self._hear))
            self._watch()

    def end(self) -> None:
        """Watch no more, and give up what was lent."""
        self._is_over, self._asked_in = True, None
        self._rest()
        self._undo.close()

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
        """Let hooks run inside that precede the zeroing of gradients, wherever that is."""
        if not self._zeroing:
            yield
            return
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
        """Note that somebody asks for the rank: in a hook, code of the user may do then what other ranks do not."""
        if self._is_watching:
            frame = sys._getframe(1)
            while frame.f_back is not None and (frame.f_code.co_name in _RANKS or _is_ours(frame.f_code.co_filename)):
                frame = frame.f_back
            self._hear(frame)

    def _hear(self, asking: types.FrameType) -> None:
        if self._is_watching and not asking.f_code.co_filename.endswith(_ITERATES):  # which changes nothing on the host
            self._asked_in = _hook_above(asking) or self._asked_in

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let ranks meet before the first call that concerns values which some rank lacks."""
        kwargs = kwargs or {}
        if not self._is_watching:
            return func(*args, **kwargs)
        if self._filled is None:
            is_partial = self._is_partial(args) or (bool(kwargs) and self._is_partial(kwargs.values()))
            if is_partial and concerns_values(func, args):
                hook = _hook_above(sys._getframe(1))
                if hook is not None and hook is not self._asked_in:
                    self._fill()
        elif self._gradients and _is_of_gradient(func) and id(args[0]) in self._gradients:
            return self._gradient(*args) if func.__name__ == "__get__" else self._set_gradient(*args)
        if self._filled is not None:
            args, kwargs = self._present(args), self._present(kwargs)
        return func(*args, **kwargs)

    def _watch(self) -> None:
        self._partial = self._weights.partial()
        if self._partial:
            self._is_watching = True
            if self._asked_in is not None:  # it is kept, so that no later call is taken for it, but not what it has
                with contextlib.suppress(RuntimeError):  # it still runs
                    self._asked_in.clear()
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

    def _is_partial(self, values: Iterable[Any]) -> bool:
        """Return whether some rank lacks a tensor among values, or in lists among them."""
        partial = self._partial
        if not partial.isdisjoint(map(id, values)):
            return True
        lists = [value for value in values if isinstance(value, (list, tuple))]
        return bool(lists) and not partial.isdisjoint(map(id, itertools.chain.from_iterable(lists)))

    def _gradient(self, parameter: torch.Tensor, *_: Any) -> torch.Tensor | None:
        """Return what stands for the gradient of a parameter that has values only for now: it stays where it is."""
        return self._gradients[id(parameter)] if is_asked_by_a_hook() else None

    def _set_gradient(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        known = self._gradients[id(parameter)]
        if isinstance(known, Guarded) and value is not None and not isinstance(value, Guarded):
            known.absence.refuse("setting .grad", known._way_out)
        self._gradients[id(parameter)] = value if isinstance(value, Guarded) else None

    def _fill(self) -> None:
        """Give every rank all values, unless one has no room for them."""
        line, missing, control = user_line(3), self._weights.missing_bytes(), self._weights.control
        with torch.inference_mode(False), torch.no_grad():
            lacks_room = torch.tensor(float(missing > _free_bytes(self._weights.device)))
            what = f"the values of all parameters, for {line} (all ranks must come there)"
            if control.sum(lacks_room, what=what, key="the values of all parameters"):
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
        if isinstance(value, (tuple, list)) and any(isinstance(one, (BufferStandIn, list, tuple)) for one in value):
            present = [self._present(one) for one in value]
            return present if isinstance(value, list) else tuple(present)
        if isinstance(value, dict):
            return {name: self._present(one) for name, one in value.items()}
        return value


def _hook_above(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the call of a hook of the user that has led to a frame, if all ranks come there; else None."""
    last, is_users = None, False
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path.startswith(_TORCH):
            if "/tensorboard/" in path:
                return None
        elif is_lightnings(path):
            if not is_users or calls_a_hook(frame):
                return last if is_users else None
        elif path != _BETWEEN:
            if _is_ours(path) or name in _ON_LOADED or any(part in path for part in _OF_ONE_RANK):
                return None
            if name in SWITCHES and isinstance(frame.f_locals.get("self"), torch.optim.Optimizer):
                return None
            is_users = True
        last, frame = frame, frame.f_back
    return None


def _is_of_gradient(func: Any) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") == "grad"


def _free_bytes(device: torch.device) -> int:
    """Return what a device has room for, with what torch keeps of it and nothing uses."""
    if device.type != "cuda":
        return room_bytes()
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


@functools.cache
def _is_ours(path: str) -> bool:
    return path.startswith(_PACKAGE) and not path.startswith(_EXAMPLES)
