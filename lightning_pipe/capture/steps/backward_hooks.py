"""Backward hooks of modules and tensors: which route runs them as one device does, and which hook is refused.

    hook on a sub-module (`register_full_backward_hook`, ...)    replay, if the sub-module is in one stage as a whole
    hook on a tensor, registered by the step, that returns one   joint: a part of the graph, which reads what it reads
    the same without a result                                    replay, inside a unit only
    on a node of autograd                                        replay, as no tracer sees what it reads
    on what autograd saves (`saved_tensors_hooks`)               replay, as a tracer ignores it
    on a parameter, registered by the step                       refused: it would be registered again every time

On the gradient of a parameter see `strategy.parameters.gradient_hooks`.
"""

from __future__ import annotations

import contextlib
import sys
import types
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
    module: pl.LightningModule,
    reading: Callable[[], Context],
    observing: Callable[[], Context],
    reads_nodes: Callable[[], bool],
) -> Iterator[None]:
    """While tracing, see what the Python of a backward reads and calls: custom functions and hooks on tensors.

    A hook that the step registers on a tensor is a part of the graph, if it can be.

    Args:
        module: whose step is traced.
        reading: entered around every backward, which runs in one thread.
        observing: entered around every call of the user's Python in it.
        reads_nodes: whether the step has looked at nodes of autograd, and may have registered hooks there.

    Raises:
        CaptureError: if a backward changes Python state, which a graph would not, or runs Python that nobody observes.
    """
    differentiate = torch.autograd.grad
    apply: Callable[..., Any] = BackwardCFunction.apply
    save: Callable[..., None] = torch.autograd.graph.saved_tensors_hooks.__init__
    observed_calls: list[Any] = []  # that run now

    def observe(function: Callable[..., Any], *args: Any) -> Any:
        observed_calls.append(function)
        try:
            with observing():
                return function(*args)
        finally:
            observed_calls.pop()

    def unseen() -> Context:
        return _refused_python(lambda: not observed_calls) if reads_nodes() else contextlib.nullcontext()

    def followed(*args: Any, **kwargs: Any) -> Any:
        with reading(), state_put_back(module) as state, torch.autograd.set_multithreading_enabled(False), unseen():
            found = differentiate(*args, **kwargs)
            if (change := next(iter(state.changes()), None)) is not None:
                raise hazard(f"its backward changes {change.slot.name} (state)", "")
            return found

    def observed(function: Any, *args: Any) -> Any:
        return observe(apply, function, *args)

    def saved(hooks: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        if any(not is_library(getattr(getattr(hook, "__code__", None), "co_filename", "")) for hook in (pack, unpack)):
            raise hazard("it has hooks on the tensors that autograd saves", user_line(2))
        save(hooks, pack, unpack)

    def checked(hook: Callable[[torch.Tensor], Any], line: str) -> Callable[[torch.Tensor], Any]:
        def run(gradient: torch.Tensor) -> Any:
            with state_put_back(module) as state:
                found = observe(hook, gradient)
                has_changed = any(True for _ in state.changes())
            if found is None or has_changed:
                raise hazard("it registers a hook on a tensor that does more than return a gradient", line)
            return found

        return run

    with (
        mock.patch.object(torch.autograd, "grad", followed),
        mock.patch.object(BackwardCFunction, "apply", observed),
        mock.patch.object(torch.autograd.graph.saved_tensors_hooks, "__init__", saved),
        _watched_registration(module, checked, of_libraries=True),
    ):
        yield


@contextlib.contextmanager
def _refused_python(is_unseen: Callable[[], bool]) -> Iterator[None]:
    """Refuse the user's Python inside, while it is unseen; every call of a function is looked at, which takes long."""

    def look(frame: types.FrameType, event: Any, argument: Any) -> None:
        code = frame.f_code
        file = frame.f_globals.get("__file__", "") if code.co_filename.startswith("<") else code.co_filename
        if is_unseen() and not is_library(file):
            line = f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
            raise hazard("its backward runs Python by a hook on a node of autograd", line)

    tracer = sys.gettrace()
    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(tracer)


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
    module: nn.Module,
    checked: Callable[[Callable[[torch.Tensor], Any], str], Any],
    *,
    of_libraries: bool = False,
) -> Iterator[None]:
    """Let `checked` see, and replace, every hook that the user's code (or a library, if wanted) registers."""
    register: Callable[..., Any] = torch.Tensor.register_hook

    def register_checked(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        if is_library(sys._getframe(1).f_code.co_filename) and not of_libraries:
            return register(tensor, hook)
        line = user_line(2)
        if any(tensor is parameter for parameter in module.parameters()):
            refuse(tensor, hook)
        return register(tensor, checked(hook, line))

    def refuse(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
        raise CaptureError(
            f"The step registers a hook on a parameter at {user_line(2)}, which would be one hook more in every call. "
            "Register it once, in __init__ or in on_train_start; it runs on the gradient of the whole batch."
        )

    with (
        mock.patch.object(torch.Tensor, "register_hook", register_checked),
        mock.patch.object(torch.Tensor, "register_post_accumulate_grad_hook", refuse),
    ):
        yield
