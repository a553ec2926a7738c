"""What other ranks have, in a step: collectives, gradients and optimizer state, refused with the user's line.

Who asks for its rank there is told 0 on all of them: what a step does on rank 0 alone (a `self.log`, a line that is
printed) belongs to every batch, as on one device, and is the same on the ranks that make one graph of it.

A step runs on one rank to be traced, and stage by stage afterwards, so no two ranks make the same collective calls. Nor
is there anything to collect: what a step sees is the whole batch, cut into micro-batches.

On one device a step may look at the gradients of the batch before, or at the momentum of its optimizer. A graph would
keep what was there when it was traced, and a rank that replays the step has both for its own parameters only.
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

from lightning_pipe.capture.python.users_code import is_library
from lightning_pipe.capture.steps.hazards import at, user_line
from lightning_pipe.capture.torch_private import answered_alone, answered_collectives
from lightning_pipe.errors import CaptureError
from lightning_pipe.lightning_names import ClusterEnvironment, rank_zero_only

_IS_INSIDE = ContextVar("inside a step", default=False)
_INSTEAD = (
    "Read it in a hook such as on_before_optimizer_step (trainer.strategy.grad_norm() is the norm of all gradients, on "
    "every rank), and keep there the number that the step needs."
)


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Refuse collectives of torch.distributed and of the strategy; entered around every run of a step."""
    token = _IS_INSIDE.set(True)
    try:
        with (
            answered_collectives(refuse_in_step),
            answered_alone(_is_users_rank),
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
def no_training_state() -> Iterator[None]:
    """Refuse reads of gradients of parameters and of optimizer state by this thread; for every run of a step."""
    gradient: Any = torch.Tensor.grad
    thread = get_ident()

    def read_gradient(tensor: torch.Tensor) -> Any:
        is_users = get_ident() == thread and not is_library(sys._getframe(1).f_code.co_filename)
        if is_users and isinstance(tensor, nn.Parameter):
            _refuse("the gradient of a parameter, which the batch before has left,")
        return gradient.__get__(tensor)

    def read_state(optimizer: Any) -> Any:
        if get_ident() == thread:
            _refuse("the state of an optimizer")
        return vars(optimizer)["state"]

    gradients = property(read_gradient, gradient.__set__, gradient.__delete__)
    with (
        mock.patch.object(torch.Tensor, "grad", gradients),
        mock.patch.object(torch.optim.Optimizer, "state", property(read_state), create=True),
    ):
        yield


def _refuse(what: str) -> None:
    raise CaptureError(
        f"The step reads {what}{at(user_line(3))}. Ranks have that for their own parameters only. {_INSTEAD}"
    )
