"""Backward hooks of modules and tensors: which route runs them as one device does, and which hook is refused.

    hook on a sub-module (`register_full_backward_hook`, ...)    replay, if the sub-module is in one stage as a whole
    hook on a tensor, registered by the step, that returns one   joint: a part of the graph, which reads what it reads
    the same without a result                                    replay, inside a unit only
    on a parameter, registered by the step                       refused: it would be registered again every time

On the gradient of a parameter see `strategy.parameters.gradient_hooks`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from lightning_pipe.capture.python.users_code import is_library
from lightning_pipe.capture.steps.hazards import hazard, user_line
from lightning_pipe.capture.steps.step_state import state_put_back
from lightning_pipe.capture.torch_private import has_backward_hooks
from lightning_pipe.errors import CaptureError
from lightning_pipe.lightning_names import pl

Context: TypeAlias = contextlib.AbstractContextManager[Any]


def hooked_modules(module: nn.Module) -> list[str]:
    """Return the paths of sub-modules with hooks on their backward."""
    return [path for path, child in module.named_modules() if has_backward_hooks(child)]


def refuse_hooked_modules(module: nn.Module) -> None:
    """Leave a module with backward hooks to replay.

    Raises:
        CaptureError: naming the first hooked sub-module.
    """
    if paths := hooked_modules(module):
        raise hazard(f"{paths[0] or type(module).__name__} has a hook on its backward, which runs Python", "")


def check_hooked_units(module: nn.Module, units: Iterable[str]) -> None:
    """Check that every module with a backward hook is a part of one unit.

    Raises:
        CaptureError: naming a module that several ranks would share.
    """
    begins = tuple(f"{unit}." for unit in units)
    for path in hooked_modules(module):
        if not f"{path}.".startswith(begins):
            raise CaptureError(
                f"{path or type(module).__name__} has a hook on its backward, but its sub-modules would be divided "
                "among ranks, none of which sees its inputs and its outputs. Register the hook on smaller sub-modules, "
                "or use one device."
            )


@contextlib.contextmanager
def backward_followed(
    module: pl.LightningModule, reading: Callable[[], Context], observing: Callable[[], Context]
) -> Iterator[None]:
    """While tracing, see what the Python of a backward reads and calls: custom functions and hooks on tensors.

    A hook that the step registers on a tensor is a part of the graph, if it can be.

    Args:
        module: whose step is traced.
        reading: entered around every backward.
        observing: entered around every call of the user's Python in it, in whatever thread.

    Raises:
        CaptureError: if a backward changes Python state, which a graph would not.
    """
    differentiate = torch.autograd.grad
    apply: Callable[..., Any] = BackwardCFunction.apply

    def followed(*args: Any, **kwargs: Any) -> Any:
        with reading(), state_put_back(module) as state:
            found = differentiate(*args, **kwargs)
            if (change := next(iter(state.changes()), None)) is not None:
                raise hazard(f"its backward changes {change.slot.name} (state)", "")
            return found

    def observed(function: Any, *args: Any) -> Any:
        with observing():
            return apply(function, *args)

    def checked(hook: Callable[[torch.Tensor], Any], line: str) -> Callable[[torch.Tensor], Any]:
        def run(gradient: torch.Tensor) -> Any:
            with state_put_back(module) as state:
                with observing():
                    found = hook(gradient)
                has_changed = any(True for _ in state.changes())
            if found is None or has_changed:
                raise hazard("it registers a hook on a tensor that does more than return a gradient", line)
            return found

        return run

    with (
        mock.patch.object(torch.autograd, "grad", followed),
        mock.patch.object(BackwardCFunction, "apply", observed),
        _watched_registration(module, checked),
    ):
        yield


@contextlib.contextmanager
def tensor_hooks_in_units(module: nn.Module, is_inside: Callable[[], bool]) -> Iterator[None]:
    """While units are traced, allow hooks that units register on their tensors, and no others.

    Args:
        module: whose step is traced.
        is_inside: whether a unit is running.
    """

    def checked(hook: Callable[[torch.Tensor], Any], line: str) -> Callable[[torch.Tensor], Any]:
        if not is_inside():
            raise CaptureError(
                f"The step registers a hook on a tensor at {line}, between calls of sub-modules, where several ranks "
                "may have a part of its gradient. Register it inside of a sub-module, or let it only return a gradient "
                "and use capture='joint'."
            )
        return hook

    with _watched_registration(module, checked):
        yield


@contextlib.contextmanager
def _watched_registration(
    module: nn.Module, checked: Callable[[Callable[[torch.Tensor], Any], str], Any]
) -> Iterator[None]:
    """Let `checked` see, and replace, every hook that the user's code registers on a tensor."""
    register: Callable[..., Any] = torch.Tensor.register_hook

    def register_checked(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        if is_library(sys._getframe(1).f_code.co_filename):
            return register(tensor, hook)
        line = user_line(2)
        if any(tensor is parameter for parameter in module.parameters()):
            raise CaptureError(
                f"The step registers a hook on a parameter at {line}, which would be one hook more in every call. "
                "Register it once, in __init__ or in on_train_start; it runs on the gradient of the whole batch."
            )
        return register(tensor, checked(hook, line))

    with mock.patch.object(torch.Tensor, "register_hook", register_checked):
        yield
