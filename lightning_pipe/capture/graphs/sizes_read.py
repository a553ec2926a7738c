"""Sizes that a step reads into Python: what it logs of them follows the samples, all else holds for one size."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from lightning_pipe.capture.python.said_texts import use_of_text
from lightning_pipe.capture.steps.hazards import at, compare_calls, user_line
from lightning_pipe.capture.steps.numbers import calls_of_samples, of_samples
from lightning_pipe.capture.steps.step_function import StepFunction
from lightning_pipe.errors import CaptureError


class SizeDependentError(CaptureError):
    """The graph of a step holds for one number of samples only."""


@contextlib.contextmanager
def sizes_in_texts() -> Iterator[None]:
    """Let the step say sizes; a step that does more with the text of one holds for that size."""

    def text(usual: Callable[[Any], str]) -> Callable[[Any], str]:
        def of(number: Any) -> str:
            use = use_of_text(sys._getframe(1))
            if use == "used":
                raise SizeDependentError(
                    f"The step makes a text of a size, and does more than print it{at(user_line(2))}."
                )
            return usual(number) if use == "internal" else str(number.node.hint)

        return of

    with contextlib.ExitStack() as stack:
        for kind in (torch.SymInt, torch.SymFloat):
            stack.enter_context(mock.patch.object(kind, "__repr__", text(kind.__repr__)))
        yield


def follow_sizes(step: StepFunction, leaves: tuple[torch.Tensor, ...], samples: int) -> None:
    """Find out what becomes of sizes that the step reads as floats: logged ones become functions of the samples.

    The step is run again on the fake tensors while the tracer pretends one and two samples more.

    Raises:
        CaptureError: if such a number enters a torch call, or is logged and not linear in the samples.
    """
    if not step.sizes_read:
        return
    traced = len(step.recordings)
    for more in (1, 2):
        step.pretended = samples + more
        step(*leaves)
    runs = step.recordings[traced - 1 :]
    calls = step.observers[traced - 1 :]
    del step.recordings[traced:], step.observers[traced:]
    try:
        compare_calls(calls[0].calls, calls[1].calls)
    except CaptureError as error:
        raise SizeDependentError(str(error)) from error
    counts = (samples, samples + 1, samples + 2)
    try:
        runs[0].calls[:] = calls_of_samples([run.calls for run in runs], counts)
        runs[0].returned = of_samples([run.returned for run in runs], counts, f"What {step.method} returns")
    except CaptureError as error:
        raise SizeDependentError(str(error)) from error
