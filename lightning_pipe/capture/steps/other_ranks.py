"""What other ranks have, in a step: collectives, gradients and optimizer state, refused with the user's line.

Who asks for its rank there is told 0 on all of them, and that there is no process group: what a step does on rank 0
alone (a `self.log`, a line that is printed) belongs to every batch, as on one device, and is the same on the ranks that
make one graph of it. A layer that would talk to other ranks (SyncBatchNorm) is what it is on one device.

A step runs on one rank to be traced, and stage by stage afterwards, so no two ranks make the same collective calls. Nor
is there anything to collect: what a step sees is the whole batch, cut into micro-batches.

On one device a step may use the gradients of the batches before, or the momentum of its optimizer: it clips what an
accumulation window has gathered, say. A graph would keep what was there when it was traced, and a rank that replays the
step has both for its own parameters only. Helpers of torch and Lightning (`clip_grad_norm_`, `zero_grad`) count as the
code that calls them.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from contextvars import ContextVar
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch import nn

from lightning_pipe.capture.python.users_code import LIGHTNING, is_library
from lightning_pipe.capture.steps.hazards import at, user_line
from lightning_pipe.capture.torch_private import answered_alone, answered_collectives, answered_uninitialized
from lightning_pipe.errors import CaptureError
from lightning_pipe.lightning_names import ClusterEnvironment, callbacks_of, pl, rank_zero_only

_IS_INSIDE = ContextVar("inside a step", default=False)
_INSTEAD = (
    "Clip by Trainer(gradient_clip_val=...), leave zeroing to Lightning, and read gradients in a hook such as "
    "on_before_optimizer_step (trainer.strategy.grad_norm() is the norm of all, on every rank), which keeps the number "
    "that the step needs."
)
_LAYERS = ("/torch/nn/modules/", "/torchmetrics/")
_HELPERS = ("/torch/nn/utils/", "/torch/nn/modules/module.py", "/torch/optim/", "/torch/amp/", *LIGHTNING)


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Refuse collectives of torch.distributed and of the strategy; entered around every run of a step."""
    token = _IS_INSIDE.set(True)
    try:
        with (
            answered_collectives(refuse_in_step),
            answered_alone(_is_users_rank),
            answered_uninitialized(_asks_for_step),
            mock.patch.object(rank_zero_only, "rank", 0, create=True),
        ):
            yield
    finally:
        _IS_INSIDE.reset(token)


@contextlib.contextmanager
def layers_in_python() -> Iterator[None]:
    """Let encoder layers of torch call their sub-modules, in evaluation too.

    Where all weights of a layer are at hand they would be given to one kernel: on ranks that have them, not on others.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def is_in_step() -> bool:
    """Return whether a step is running in this thread."""
    return _IS_INSIDE.get()


def _is_users_rank(asking: types.FrameType) -> bool:
    """Return whether code of a step asks, and not what tells this package its rank."""
    return not (is_library(asking.f_code.co_filename) or isinstance(asking.f_locals.get("self"), ClusterEnvironment))


def _asks_for_step(asking: types.FrameType) -> bool:
    """Return whether code of a step asks, or a layer in it that would talk to other ranks (SyncBatchNorm)."""
    return is_in_step() and (_is_users_rank(asking) or any(part in asking.f_code.co_filename for part in _LAYERS))


def refuse_in_step(name: str) -> None:
    """Raise if a step is running in this thread.

    Args:
        name: what was called.

    Raises:
        CaptureError: naming the call and the user's line.
    """
    if not _IS_INSIDE.get():
        return
    raise CaptureError(
        f"The step calls the collective {name}{at(user_line(2))}. In a pipeline the ranks run different "
        "parts of the step, so it would wait for ever; and every batch is whole, so there is nothing to collect. "
        "Remove the call, or use self.all_gather(x), which returns x as it does on one device."
    )


@contextlib.contextmanager
def no_training_state(module: nn.Module) -> Iterator[None]:
    """Refuse uses of gradients of parameters and of optimizer state by this thread; for every run of a module's step.

    While a step is traced, tensors of other types hang in the places of parameters. Zeroing does nothing where no
    gradients are gathered over batches: Lightning zeroes them behind the step.
    """
    gradient: Any = torch.Tensor.grad
    thread, gathers = get_ident(), _gathers_gradients(getattr(module, "_trainer", None))

    def check(tensor: torch.Tensor, what: str) -> None:
        if get_ident() != thread or not _is_for_user(sys._getframe(2)):
            return
        if isinstance(tensor, nn.Parameter) or any(tensor is parameter for parameter in module.parameters()):
            _refuse(f"{what} the gradient of a parameter, which the batch before has left,", skip=3)

    def read_gradient(tensor: torch.Tensor) -> Any:
        asking = sys._getframe(1).f_code
        if not gathers and asking.co_name == "zero_grad" and is_library(asking.co_filename) and get_ident() == thread:
            return None
        check(tensor, "reads")
        return gradient.__get__(tensor)

    def write_gradient(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
        check(tensor, "writes")
        gradient.__set__(tensor, value)

    def delete_gradient(tensor: torch.Tensor) -> None:
        check(tensor, "deletes")
        gradient.__delete__(tensor)

    def read_state(optimizer: Any) -> Any:
        if get_ident() == thread:
            _refuse("reads the state of an optimizer", skip=2)
        return vars(optimizer)["state"]

    with (
        mock.patch.object(torch.Tensor, "grad", property(read_gradient, write_gradient, delete_gradient)),
        mock.patch.object(torch.optim.Optimizer, "state", property(read_state), create=True),
    ):
        yield


def _gathers_gradients(trainer: Any) -> bool:
    """Return whether gradients of several batches may be added before an optimizer steps, as far as that is known."""
    if not isinstance(trainer, pl.Trainer) or trainer.accumulate_grad_batches != 1:
        return True
    return any(isinstance(one, pl.callbacks.GradientAccumulationScheduler) for one in callbacks_of(trainer))


def _is_for_user(asking: types.FrameType) -> bool:
    """Return whether code uses a gradient by itself or for its caller, and not because an operation runs."""
    file = asking.f_code.co_filename
    if not is_library(file):
        return True
    return any(part in file for part in _HELPERS) and asking.f_code.co_name != "_apply"  # which moves a module


def _refuse(what: str, *, skip: int) -> None:
    raise CaptureError(
        f"The step {what}{at(user_line(skip + 1))}. Ranks have that for their own parameters only. {_INSTEAD}"
    )
