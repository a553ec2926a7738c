"""Random numbers of a plain step that are those of its plays: generators are seeded around every unit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import nn

from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.recording.units import UnitTrace
from lightning_pipe.capture.replayed.module_scope import keyed, seed
from lightning_pipe.capture.replayed.stage_spec import WHOLE_BATCH
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.torch_private import checkpoint_only


@contextlib.contextmanager
def unit_draws(trace: UnitTrace, request: Request, key: RandomKey) -> Iterator[Callable[[], str]]:
    """Seed all generators before a plain step, and before and after every unit, as a play of the step does, inside.

    Yields:
        A function that returns "": the numbers are the same.
    """
    units = _Units(trace, request, key)
    with (
        keyed(key, request.device),
        checkpoint_only(lambda: units.is_inside),
        mock.patch.object(nn.Module, "__call__", units.interceptor()),
    ):
        yield lambda: ""


class _Units:
    """Count the units that a plain step calls, and seed around them."""

    def __init__(self, trace: UnitTrace, request: Request, key: RandomKey) -> None:
        called = {unit.path for unit in trace.units}
        self._units = {id(child) for path, child in request.module.named_modules() if path in called}
        self._key, self._device = key, request.device
        self._last, self._behind = len(trace.units) - 1, key
        if trace.head == "holds":
            self._behind = replace(key, microbatch=WHOLE_BATCH, first_sample=0)
        self._called = 0
        self.is_inside = False

    def interceptor(self) -> Callable[..., Any]:
        """Return what is called instead of sub-modules."""
        plain = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self.is_inside or id(module) not in self._units:
                return plain(module, *args, **kwargs)
            number, self._called = self._called, self._called + 1
            seed(self._key, 2 * number + 1, self._device)
            self.is_inside = True
            try:
                result = plain(module, *args, **kwargs)
            finally:
                self.is_inside = False
            key = self._behind if number == self._last else self._key
            seed(key, 2 * number + 2, self._device)
            return result

        return call
