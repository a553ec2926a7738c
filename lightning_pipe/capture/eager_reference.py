"""Eager reference of a captured step: the plain step with the random numbers that the captured one draws.

For comparison with the captured step. The module runs as it is, on one device, forward and backward:

joint     the k-th random operation of the plain step draws from the key of the graph's k-th one (`stages.graph_draws`).
          If they are not the same operations one by one, nothing can be compared, and `EagerReference.unmatched` says
          why.
replay    all generators are seeded around every unit, as they are when the step is played (`replayed.unit_draws`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_pipe.capture.graphs.request import Request
from lightning_pipe.capture.route import Route
from lightning_pipe.capture.steps.call_recording import StepRecording, recording_calls
from lightning_pipe.capture.steps.keyed_random import undisturbed
from lightning_pipe.capture.steps.metric_result import with_loss
from lightning_pipe.capture.steps.module_tables import canonical_names
from lightning_pipe.capture.steps.other_ranks import no_collectives
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.steps.step_function import loss_of
from lightning_pipe.capture.torch_private import TorchDispatchMode
from lightning_pipe.errors import none_caught


@dataclass(frozen=True)
class EagerReference:
    """What a plain run gave.

    Attributes:
        loss: of these samples; None for a step without a backward.
        gradients: by canonical name; of parameters that got one.
        coarsest: the least exact floating type of all that forward computed.
        unmatched: "" if the same random numbers were drawn as by the captured step, else why not.
        buffers: content afterwards of the buffers that the captured step writes, by name.
        recording: what the step logged and returned.
    """

    loss: torch.Tensor | None
    gradients: dict[str, torch.Tensor]
    coarsest: torch.dtype
    unmatched: str
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    recording: StepRecording = field(default_factory=StepRecording)


def run_plainly(
    captured: Route,
    request: Request,
    tensors: Sequence[torch.Tensor],
    key: RandomKey,
    *,
    before_backward: Callable[[], None] = lambda: None,
) -> EagerReference:
    """Run a step, and its backward in training; gradients of the module must be None before and are afterwards.

    Buffers, attributes and whatever else the step changes are left as it leaves them; generators are as before.

    Args:
        captured: the same step, captured.
        request: what was captured; its module is whole, and on `request.device`.
        tensors: leaves of the batch, of some samples, on that device.
        key: key of the random numbers.
        before_backward: called when the loss is there; may raise.
    """
    module, exactness, recording = request.module, _Exactness(), StepRecording()
    training = captured.record.loss is not None
    with contextlib.ExitStack() as stack:
        scene = (undisturbed(request.device), torch.set_grad_enabled(training), recording_calls(module, recording))
        for entered in (*scene, no_collectives()):
            stack.enter_context(entered)
        stack.enter_context(request.context())
        stack.enter_context(exactness)
        unmatched = stack.enter_context(captured.matched_draws(request, key))
        stack.enter_context(none_caught())
        output = getattr(module, request.method)(
            request.structure.fill_part(tensors, request.batch_dim), *request.arguments
        )
        output = with_loss(request.method, output) if training else output
        recording.returned = recording.lift(output)
    loss = loss_of(module, request.method, output) if training else None
    before_backward()
    if training:
        assert loss is not None, "a training step returns a loss"
        loss.backward()
    parameters = {name: module.get_parameter(name) for name in dict.fromkeys(canonical_names(module).values())}
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    loss, coarsest = None if loss is None else loss.detach(), exactness.coarsest
    written = {*captured.writes, *(late.state for late in captured.late_values)}
    named = module.named_buffers(remove_duplicate=False)
    buffers = {name: buffer.detach().clone() for name, buffer in named if name in written}
    return EagerReference(loss, gradients, coarsest, unmatched(), buffers, recording)


class _Exactness(TorchDispatchMode):
    """Note the least exact floating type among the results of all operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.coarsest = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.coarsest = max(self.coarsest, tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result
