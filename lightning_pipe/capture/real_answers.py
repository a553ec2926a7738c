"""Answers to the questions of a step (`if loss > 100`), by one run of it on real tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.recording.unit_state import left_as_it_was
from lightning_pipe.capture.steps.call_recording import StepRecording, recording_calls
from lightning_pipe.capture.steps.hazards import Answerer, restored_generators
from lightning_pipe.capture.steps.other_ranks import no_collectives, no_training_state
from lightning_pipe.errors import none_caught


def real_answers(request: Request, tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """Run the step on real tensors (no backward) and return the truth values it asked for; leave no trace.

    Parameters, buffers and everything else of the module, and all random generators, are as before afterwards.

    Args:
        request: the step; its module holds real parameters.
        tensors: leaves of a batch.
    """
    module, answerer = request.module, Answerer()
    devices = [request.device] if request.device.type == "cuda" else []
    with (
        left_as_it_was(module) as kept,
        kept.keeper,
        torch.random.fork_rng(devices=devices),
        restored_generators(),
        request.context(),
        recording_calls(module, StepRecording()),
        no_collectives(),
        no_training_state(module),
        answerer,
        none_caught(),
    ):
        getattr(module, request.method)(request.structure.fill(tensors), *request.arguments)
    return tuple(answerer.answers)
