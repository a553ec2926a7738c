"""Gradients and optimizer state in a step: refused with the user's line, as only ranks that hold a parameter have them.

On one device a step may look at the gradients of the batch before, or at the momentum of its optimizer. A graph would
keep what was there when it was traced, and a rank that replays the step has both for its own parameters only.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from threading import get_ident
from typing import Any
from unittest import mock

import torch
from torch import nn

from lightning_pipe.capture.python.users_code import is_library
from lightning_pipe.capture.steps.hazards import user_line
from lightning_pipe.errors import CaptureError

_INSTEAD = (
    "Read it in a hook such as on_before_optimizer_step (trainer.strategy.grad_norm() is the norm of all gradients, on "
    "every rank), and keep there the number that the step needs."
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
    line = user_line(3)
    where = f" at {line}" if line else ""
    raise CaptureError(f"The step reads {what}{where}. Ranks have that for their own parameters only. {_INSTEAD}")
