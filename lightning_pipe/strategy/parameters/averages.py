"""Averages of weights that callbacks of Lightning keep (EMA, SWA): each rank averages what it holds.

Such a callback copies the module before training, and averages parameter by parameter and buffer by buffer. So:

    begin()     the copy of every rank gets the values of rank 0
    place()     the copy's tensors live where those of the module do, and are stand-ins elsewhere
    averaging, swapping    the callback's own code, to which module and copy have nothing but what is here
    state_dict() of the copy    has every value on rank 0, as that of the module
    restore()   the copy is whole again where the module is

The callback, its hooks and its checkpoints are Lightning's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from lightning_pipe.errors import UnsupportedError
from lightning_pipe.lightning_names import callbacks_of, pl
from lightning_pipe.strategy import lightning_private as private
from lightning_pipe.strategy.parameters.stand_ins import only_present, unguarded
from lightning_pipe.strategy.parameters.weights import Weights
from lightning_pipe.strategy.ranks.control_plane import ControlPlane

Connected = Callable[[], AbstractContextManager[ControlPlane | None]]


class Averages:
    """The averages that the callbacks of a trainer keep.

    Args:
        trainer: with its callbacks, which have been set up.
        weights: of the module.
        connected: opens connections to the other ranks, after the fit too; None where there are none.
        settle: has weights that stay.
    """

    def __init__(
        self, trainer: pl.Trainer, weights: Weights, *, connected: Connected, settle: Callable[[], None]
    ) -> None:
        kept = [(one, private.average_of(one)) for one in callbacks_of(trainer) if private.keeps_average(one)]
        self._kept = [
            _Average(callback, copy, weights, connected=connected, settle=settle)
            for callback, copy in kept
            if copy is not None
        ]

    def begin(self) -> None:
        """Give every rank the averages of rank 0; on all ranks together."""
        for average in self._kept:
            average.weights.share()

    def place(self, device: torch.device) -> None:
        """Let averages live where the weights do."""
        for average in self._kept:
            average.place(device)

    def restore(self, ranks: Collection[int]) -> None:
        """Give these ranks whole averages; on all ranks together. If those are all, callbacks are as they were."""
        for average in self._kept:
            average.weights.restore(ranks)
            if len(ranks) == average.weights.control.ranks:
                average.release()

    def leave(self) -> None:
        """Leave averages where they are."""
        for average in self._kept:
            average.weights.leave()
            average.release()


class _Average:
    """One callback, and its copy of the module."""

    def __init__(
        self,
        callback: pl.Callback,
        copy: pl.LightningModule,
        weights: Weights,
        *,
        connected: Connected,
        settle: Callable[[], None],
    ) -> None:
        _refuse_coupling(callback)
        self.weights = Weights(copy, weights.control)
        self._callback, self._copy, self._of = callback, copy, weights
        self._connected, self._settle = connected, settle
        averaged = private.averaged_model(callback)
        self._replaced = [
            *((owner, name, self._on_what_is_here) for owner, name in private.averaging_methods(callback)),
            (averaged, "state_dict", self._on_rank_0),
            (averaged, "load_state_dict", self._on_everything),
            (callback, "on_load_checkpoint", self._with_module_too),
        ]
        self.release()  # who held another session's
        if weights.control.ranks > 1:
            for owner, name, around in self._replaced:
                vars(owner)[name] = partial(_inside, around, getattr(owner, name))

    def release(self) -> None:
        for owner, name, _ in self._replaced:
            vars(owner).pop(name, None)

    def place(self, device: torch.device) -> None:
        self.weights.follow(self._of, device=private.device_of_average(self._callback) or device)

    @contextlib.contextmanager
    def _on_what_is_here(self) -> Iterator[None]:
        self._settle()
        with only_present(self._of.module, self._copy):
            yield

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Let the averages of other ranks be reached, after the fit too."""
        with self._connected() as control:
            if control is not None:
                self.weights.reach(control)
            yield

    @contextlib.contextmanager
    def _on_rank_0(self) -> Iterator[None]:
        with self._reached(), self.weights.whole(), unguarded():
            yield

    @contextlib.contextmanager
    def _on_everything(self) -> Iterator[None]:
        with self._reached(), self.weights.everywhere():
            yield

    @contextlib.contextmanager
    def _with_module_too(self) -> Iterator[None]:
        with self._on_everything(), self._of.everywhere():
            yield


def _inside(around: Callable[[], AbstractContextManager[None]], method: Any, *args: Any, **kwargs: Any) -> Any:
    with around():
        return method(*args, **kwargs)


def _refuse_coupling(callback: pl.Callback) -> None:
    """Refuse a function of the user's that sees all parameters at once, which no rank has.

    Raises:
        UnsupportedError: with the way out.
    """
    function = private.function_of_all(callback)
    if function is not None and function.__module__ != torch.optim.swa_utils.__name__:
        raise UnsupportedError(
            f"{type(callback).__name__} has a multi_avg_fn of its own ({function.__qualname__}), which sees all "
            "parameters at once; in a pipeline no rank has them. Write it as avg_fn, which averages one parameter, or "
            "use one of torch.optim.swa_utils."
        )
