"""State that settles: Python state that the first call of a step changes for good.

A classifier of transformers writes its `problem_type` into its config in its first call, other modules build a mask or
a table once. A trace sees state that the next call reads, and refuses. Two calls on a whole batch, as one device would
make them, tell more: what the first one changes and the second one leaves alone has settled, if both compute the same.
The graph of the second call is the first one's, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.recording.record_units import UnitRecorder
from lightning_pipe.capture.recording.unit_state import ModuleSnapshot, left_as_it_was
from lightning_pipe.capture.steps.hazards import restored_generators
from lightning_pipe.capture.steps.keyed_random import undisturbed
from lightning_pipe.capture.steps.record import KeptState
from lightning_pipe.capture.steps.trees import mapped


def settled_state(request: Request, tensors: Sequence[torch.Tensor]) -> tuple[KeptState, ...]:
    """Run a step twice on real tensors, and return what settles in the first run; the module is as it was afterwards.

    Args:
        request: the step; its module holds real parameters.
        tensors: leaves of a whole batch.

    Returns:
        The changes, with tensors on the host. None if nothing settles, if the second run computes something else, if
        the first one writes to parameters, or if a change has no place that other ranks could find.
    """
    recorder = UnitRecorder(replace(request, samples=request.total), tensors)
    with contextlib.suppress(Exception), left_as_it_was(request.module) as unsettled:
        with unsettled.keeper:
            first = _outcome(recorder, request)
        changes = unsettled.left()
        settled = ModuleSnapshot(request.module)
        second = _outcome(recorder, request)
        again = {change.name for change in settled.left()}
        lasting = [change for change in changes if change.name not in again]
        is_same = len(first) == len(second) and all(map(_is_equal, first, second))
        if is_same and not unsettled.keeper.names() and all(change.path for change in lasting):
            return tuple(replace(change, value=mapped(change.value, torch.Tensor, _on_host)) for change in lasting)
    return ()  # what a run raises, replay raises again


def _outcome(recorder: UnitRecorder, request: Request) -> list[torch.Tensor]:
    """Return what a run gives, with the same random numbers for every run."""
    with undisturbed(request.device), restored_generators():
        torch.manual_seed(0)
        return recorder.outcome()


def _is_equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two results are equal up to the order in which a GPU adds."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    rounding = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() and one.is_cuda else 0.0
    return torch.allclose(one, two, rtol=rounding, atol=0.0, equal_nan=True)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()
