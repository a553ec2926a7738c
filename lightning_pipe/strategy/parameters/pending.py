"""A parameter that has no values yet: the user's own object, whose values a tape makes when it is known who needs them.

It answers like the stand-in of a parameter that other ranks have. In-place writes (`copy_` of `load_state_dict`, the
initialisers of `torch.nn.init`) are written down on the tape, and so happen when the values are made.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn

from lightning_pipe.capture.steps.hazards import at, user_line
from lightning_pipe.capture.torch_private import TorchDispatchMode, swap_contents, unguarded
from lightning_pipe.errors import AbsentError
from lightning_pipe.strategy.parameters.stand_ins import Absence, StandIn, bare
from lightning_pipe.strategy.start.tape import Tape
from lightning_pipe.strategy.start.unread import Unread

_WAY_OUT = "Do it in configure_model, where values are read at once; or in on_fit_start and later, where they are made"
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class NotYet(Absence):
    """What is known of values that are not made yet.

    Attributes:
        tape: makes them.
    """

    tape: Tape | None = None

    def refuse(self, what: str, way_out: str) -> NoReturn:
        """Raise an error: something reads the values."""
        raise AbsentError(
            f"{what}{at(user_line(3))} reads or writes the values of {self.name}, which has none before "
            f"it is known which rank needs them (it was built by configure_model or trainer.init_module). {way_out}."
        )


class Pending(StandIn):
    """A parameter of the user that has no values yet."""

    absence: NotYet
    _way_out = _WAY_OUT

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write down what writes in place; answer what does not depend on values, and refuse the rest."""
        kwargs, name, first = kwargs or {}, func.__name__, args[0] if args else None
        if not (isinstance(first, Pending) and name.endswith("_") and not name.endswith("__")) or name in _OF_FLAGS:
            return super().__torch_function__(func, types, args, kwargs)
        tape = first.absence.tape
        assert tape is not None, "given by `suspend`"
        if name == "copy_" and isinstance(args[1], Unread) and args[1].shape == first.shape:
            tape.load(first.absence.form, args[1].read)
            return first
        forms = apply_to_collection((args, kwargs), Pending, lambda parameter: parameter.absence.form)
        with unguarded(), PendingRecording(tape):
            func(*forms[0], **forms[1])
        return first


_OF_FLAGS = frozenset({"requires_grad_", "share_memory_"})


class PendingRecording(TorchDispatchMode):
    """Let operators on tensors that are not made yet be written down."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        return self._tape.run(func, args, kwargs or {})


def suspend(parameter: nn.Parameter, tape: Tape) -> None:
    """Turn a parameter of the meta device that a tape makes into one of the host that has no values yet."""
    form = nn.Parameter(torch.empty(0, dtype=parameter.dtype), requires_grad=parameter.requires_grad)
    swap_contents(parameter, form)
    name = f"a parameter of shape {tuple(form.shape)}"
    _mark(parameter, NotYet(name, (), 0, _HOST, form, type(parameter), tape=tape))


def put_off(parameter: nn.Parameter, absence: NotYet) -> None:
    """Take the values of a parameter away again."""
    parameter.grad = None
    parameter.data = torch.empty(0, dtype=parameter.dtype)
    _mark(parameter, absence)


def _mark(parameter: nn.Parameter, absence: NotYet) -> None:
    parameter.__class__ = Pending
    vars(parameter).update(absence=absence, gradient=None)


@contextlib.contextmanager
def converting(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let a module be converted to another type inside; values that are made later will be of that type."""
    kept = list(parameters)
    with bare(kept):
        yield
    for parameter in (one for one in kept if isinstance(one, Pending)):
        with unguarded():
            dtype, form = parameter.dtype, parameter.absence.form.detach()
        if dtype != form.dtype:
            tape = parameter.absence.tape
            assert tape is not None, "given by `suspend`"
            with PendingRecording(tape):
                parameter.absence = replace(parameter.absence, form=form.to(dtype))


def call_it(parameter: nn.Parameter, name: str) -> None:
    """Let a parameter that has no values yet know what it is called."""
    if isinstance(parameter, Pending):
        parameter.absence = replace(parameter.absence, name=f"the parameter {name}")
