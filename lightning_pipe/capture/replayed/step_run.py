"""One run of a step on a stage: calls of units are answered with what is run here, arrived, or stands in.

Units inside a checkpoint, and those that the plan recomputes, keep nothing but their inputs; glue keeps what it saves.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lightning_pipe.capture.recording.checkpoint_depth import CheckpointDepth
from lightning_pipe.capture.recording.unit_inputs import Untouched, row_sums
from lightning_pipe.capture.replayed.module_scope import seed
from lightning_pipe.capture.replayed.other_stages import OtherStages
from lightning_pipe.capture.replayed.replay_values import UnitSizes, filled, have_form, replaced, size_of, tensors_in
from lightning_pipe.capture.replayed.stage_spec import Tensors
from lightning_pipe.capture.steps.call_recording import StepRecording, recording_calls
from lightning_pipe.capture.steps.other_ranks import no_collectives
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.torch_private import FakeTensor
from lightning_pipe.errors import PipelineError


class _TheRestIsOthers(BaseException):
    """End a play: the next unit belongs to a later stage. No `except Exception` of the user's catches it."""


class StepRun:
    """One run of the step on a stage: how far it is, whether inside a unit, what it has sent and was given.

    Args:
        others: what the stage needs of other stages.
        metrics: the module's metrics by path.
        samples: number of samples.
        key: key of the random numbers.
        given: outputs of the given units.
        sizes: of what earlier units return, where stages tell each other.
        hang: context in which the module has the parameters and buffers of this run.

    Attributes:
        checkpoints: knows whether a checkpoint runs, outside of units.
        is_inside: whether a unit runs.
        sizes: of what the units up to here return.
        sent: outputs of the units that others are given.
        leaves: what it was given, as leaves of autograd.
        called: numbers of the units that were called.
        asked: sums of the rows of what units were given whose inputs are compared.
        untouched: tensors that glue has not made.
        made: nodes of autograd's graph that made what units returned.
        touched: path of the first unit that is given others, and was not when it was traced; "" if there is none.
    """

    def __init__(
        self,
        others: OtherStages,
        metrics: Mapping[str, nn.Module],
        *,
        samples: int,
        key: RandomKey,
        given: Mapping[int, Tensors],
        sizes: UnitSizes,
        hang: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._hang = hang
        self._others, self._step, self._part, self._metrics = others, others.step, others.part, metrics
        self._samples, self._key, self._given = samples, key, given
        self.sizes = dict(sizes)
        self._called = 0
        self.checkpoints = CheckpointDepth()
        self.is_inside = False
        self.sent: dict[int, Tensors] = {}
        self.leaves: dict[int, Tensors] = {}
        self.called: list[int] = []
        self.asked: dict[int, torch.Tensor] = {}
        self.untouched = Untouched()
        self.made = set[Any]()
        self.touched = ""

    def position(self) -> int:
        """Return where the step is: an odd number inside a unit, an even one between units."""
        return 2 * self._called - self.is_inside

    def answer(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Answer a call of a unit's module."""
        if self.is_inside:
            return call(*args, **kwargs)
        number = self._step.number(module, self._called)
        if number >= self._part.end:
            raise _TheRestIsOthers
        self._called = number + 1
        self.called.append(number)
        if self._part.is_head and self._step.trace.units[number].is_given_as_is and not self.touched:
            self.touched = "" if self.untouched.are((args, kwargs)) else self._step.trace.units[number].path
        if number in self._part.asked:
            self.asked[number] = self._sums(number, (args, kwargs))
        own = partial(self._own, number, partial(call, *args, **kwargs))
        result = self._of_others(number) if number < self._part.begin else own()
        self.untouched.note(tensors_in(result) if self._part.is_head else ())
        if self._part.is_last and self._step.trace.law is not None and not self._step.head:  # who reads its law
            self.made.update(get_gradient_edge(tensor).node for tensor in tensors_in(result) if tensor.requires_grad)
        self._seed(2 * number + 2)
        if self._part.stops and number == self._part.end - 1:
            raise _TheRestIsOthers
        return result

    def _sums(self, number: int, given: Any) -> torch.Tensor:
        """Return the sums of the rows of what a unit is given: none where a play skips it, or nothing has the rows."""
        unit, device = self._step.trace.units[number], self._step.device
        if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(given)):
            return torch.full((self._samples, 2), math.nan, dtype=torch.float64, device=device)
        return row_sums(given, self._samples, device, blocks=unit.blocks)

    def run(self, step: Callable[[], Any]) -> Any:
        """Run the step as far as this stage does; return its result, None before its end."""
        output = None
        if self._part.is_last and not self._part.stops:
            output = step()
        elif not self._part.stops or self._part.begin < self._part.end:  # else all is the head's
            with contextlib.suppress(_TheRestIsOthers):
                output = contextvars.copy_context().run(step)  # it may set back what it sets behind where it stops
        self._send_nothing()
        return output

    def _send_nothing(self) -> None:
        """Send not-a-number (nobody may use it) in the place of what the step skips in this batch, and zeros back."""
        part, step = self._part, self._step
        for k in (k for k in part.sent if k not in self.sent):
            outputs = step.trace.units[k].outputs
            self.sent[k] = tuple(
                torch.full(
                    size_of(output, self._samples),
                    math.nan if output.dtype.is_floating_point or output.dtype.is_complex else 0,
                    dtype=output.dtype,
                    device=step.device,
                )
                for output in outputs
            )
        for k in (k for k in part.asked if k not in self.asked):
            self.asked[k] = torch.full((self._samples, 2), math.nan, dtype=torch.float64, device=step.device)
        for k in (k for k in part.given if k not in self.leaves):
            self.leaves[k] = tuple(self._others.handed(k, self._given[k]))

    def _own(self, number: int, call: Callable[[], Any]) -> Any:
        self._seed(2 * number + 1)
        self.is_inside = True
        try:
            result = self._checkpointed(call) if self._is_checkpointed(number) else call()
        finally:
            self.is_inside = False
        if self._step.sizes_travel and have_form(self._step.trace.units[number], tensors_in(result)):
            self.sizes[number] = tuple(tuple(tensor.shape) for tensor in tensors_in(result))
        if number not in self._part.sent:
            return result
        tensors = self._checked(number, tensors_in(result))
        self.sent[number] = tensors
        outputs = self._step.trace.units[number].outputs
        handed = [t.clone() if o.is_overwritten else t for t, o in zip(tensors, outputs, strict=True)]
        return replaced(result, handed)

    def _is_checkpointed(self, number: int) -> bool:
        """Return whether a unit runs again in the backward; not one that would change state, or the dice, once more."""
        trace = self._step.trace
        if number in self._part.recomputed:
            return True
        return self.checkpoints.count > 0 and not trace.units[number].mutations and not trace.is_random_in_python

    def _checkpointed(self, call: Callable[[], Any]) -> Any:
        """Call a unit whose activations are recomputed; what it logs then is what it has logged."""
        module, metrics, runs = self._step.module, self._metrics, itertools.count()

        def run() -> Any:
            if next(runs) == 0:
                return call()
            with self._hang(), recording_calls(module, StepRecording(), metrics), no_collectives():
                return call()

        return checkpoint(run, use_reentrant=False)

    def _seed(self, number: int) -> None:
        step = self._step
        seed(self._key, number, step.device, all_generators=step.trace.is_random_in_python)

    def _checked(self, number: int, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        unit, sizes_travel = self._step.trace.units[number], self._step.sizes_travel
        found = [(tuple(t.shape), t.dtype) for t in tensors]
        expected = [(size_of(output, self._samples), output.dtype) for output in unit.outputs]
        is_right = have_form(unit, tensors) if sizes_travel else found == expected
        if any(isinstance(t, FakeTensor) for t in tensors) or not is_right:
            law = "as many dimensions" if sizes_travel else "shapes that depend on the number of samples only"
            raise PipelineError(
                f"{unit.path} returned {found}; expected {expected} for {self._samples} samples, as when it was "
                f"traced. What crosses stages must have {law}: pad to one length, or give all ranks to one stage by "
                "`layout`."
            )
        return tuple(tensors)

    def _of_others(self, number: int) -> Any:
        unit = self._step.trace.units[number]
        if number not in self._given:
            traced = tuple(size_of(output, self._samples) for output in unit.outputs)
            return self._others.outputs(number, self.sizes.get(number, traced))
        leaves = tuple(self._others.handed(number, self._given[number]))
        self.leaves[number] = leaves
        handed = [t.clone() if o.is_overwritten else t for t, o in zip(leaves, unit.outputs, strict=True)]
        return filled(unit.template, handed)
