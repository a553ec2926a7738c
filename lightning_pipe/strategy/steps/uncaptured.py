"""Evaluation by a step that no route can hold (a search whose calls values decide): rank 0 runs it as it is.

It has the whole module for that long, and the whole batch; then all ranks hear what the step said. Ranks draw nothing
of their own, so all end with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from lightning_pipe.capture import Request
from lightning_pipe.capture.recording.units import OutputRules
from lightning_pipe.capture.replayed.head_words import Words
from lightning_pipe.capture.replayed.module_scope import keyed
from lightning_pipe.capture.replayed.output_words import merged_outputs
from lightning_pipe.capture.replayed.replay_values import finish
from lightning_pipe.capture.steps.call_recording import StepRecording, recording_calls
from lightning_pipe.capture.steps.other_ranks import no_collectives
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.steps.step_state import ModuleState
from lightning_pipe.capture.torch_private import version_of
from lightning_pipe.errors import UncapturedError, UnsupportedError
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.strategy.start.on_device import run_on_device
from lightning_pipe.strategy.steps.merge_logs import combined, gathered
from lightning_pipe.strategy.steps.step_calls import StepRequest, StepSaid
from lightning_pipe.strategy.steps.step_capture import RankSetup


class UncapturedSteps:
    """Run the evaluation steps that no route can hold; on all ranks together.

    Args:
        setup: of this rank.
    """

    def __init__(self, setup: RankSetup) -> None:
        self._setup = setup
        self._reasons: dict[str, UncapturedError] = {}

    def __contains__(self, method: str) -> bool:
        """Return whether a step is known to be one of them."""
        return method in self._reasons

    def add(self, method: str, reason: UncapturedError) -> None:
        """Run a step as it is from now on.

        Raises:
            UncapturedError: on every rank, if rank 0 has no room for the whole module.
        """
        control = self._setup.links.control
        if control.broadcast(self._setup.weights.room().refusal, source=0, what="what rank 0 has room for"):
            raise reason
        self._reasons[method] = reason
        rank_zero_warn(
            f"{method} runs as it is, on rank 0, which is sent all parameters for every batch: this is slow. {reason}"
        )

    def run(self, call: StepRequest, *, samples: int, key: RandomKey) -> StepSaid:
        """Run a step on a batch, and return what it said on every rank.

        Raises:
            UnsupportedError: on every rank, if it changes a buffer, of which only rank 0 would know.
        """
        control, weights = self._setup.links.control, self._setup.weights
        mine = None if call.tensors is None else [tensor.cpu() for tensor in call.tensors]
        tensors = control.to_first(mine, source=call.holder, what="the batch of a step that runs as it is")
        words: list[Words] = []

        def run() -> None:
            assert tensors is not None, "rank 0 was sent the batch"
            words.append((0, 0, samples, run_on_device(partial(_said, key=key), self._request(call), tensors)))

        with weights.whole(placed=weights.room().placed):
            control.agreed(run, source=0, what="whether the step has run")
        heard = gathered(words, (0,), control)
        record, values, _ = combined(heard, device=self._setup.device, rows={})
        outputs, printed, _ = merged_outputs(heard, OutputRules(), self._setup.device)
        return StepSaid(replace(record, outputs=outputs), {**values, **printed}, samples)

    def _request(self, call: StepRequest) -> Request:
        setup = self._setup
        return Request(
            module=setup.module,
            method=call.method,
            structure=call.structure,
            arguments=call.arguments,
            samples=None,
            batch_dim=setup.config.batch_dim,
            device=setup.device,
            context=setup.contexts[call.method],
        )


def _said(request: Request, tensors: Sequence[torch.Tensor], *, key: RandomKey) -> StepRecording:
    """Run a step, put its Python state back, and return what it said and left behind."""
    module, recording = request.module, StepRecording(is_whole=True)
    python, buffers = ModuleState(module, copies=True), _buffers(module)
    try:
        with torch.no_grad(), keyed(key, request.device), recording_calls(module, recording), no_collectives():
            with request.context():
                output = getattr(module, request.method)(request.structure.fill(tensors), *request.arguments)
            if changed := {name for name, _ in buffers ^ _buffers(module)}:
                raise UnsupportedError(
                    f"{request.method} runs as it is, on rank 0, and changes the buffer {min(changed)}, of which no "
                    "other rank would know. Use a torchmetrics object, or change it in on_validation_batch_end."
                )
            recording.kept = [replace(kept, value=recording.lift(kept.value)) for kept in python.kept()]
            finish(recording, output, None)
    finally:
        python.restore()
    return recording


def _buffers(module: nn.Module) -> set[tuple[str, tuple[int, int]]]:
    """Return the buffers of a module by name, with what tells whether they were replaced or written to."""
    return {(name, (id(buffer), version_of(buffer))) for name, buffer in module.named_buffers()}
