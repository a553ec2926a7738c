"""Eager reference of a captured step: the plain step with the random numbers that the captured one draws.

For comparison with the captured step. The module runs as it is, on one device, forward and backward:

joint     the k-th random operation of the plain step draws from the key of the graph's k-th one (`GraphDice`). If they
          are not the same operations one by one, nothing can be compared, and `Plain.unmatched` says why.
replay    all generators are seeded around every unit, as they are when the step is played.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from lightning_pipe.capture.capture import Capture
from lightning_pipe.capture.graphs.trace import Request
from lightning_pipe.capture.recording.units import UnitTrace
from lightning_pipe.capture.replayed.module_scope import keyed, seed
from lightning_pipe.capture.replayed.replay import Replay
from lightning_pipe.capture.stages.assign import is_random
from lightning_pipe.capture.steps.collectives import no_collectives
from lightning_pipe.capture.steps.keyed_random import keyed as drawing
from lightning_pipe.capture.steps.keyed_random import undisturbed
from lightning_pipe.capture.steps.metric_result import with_loss
from lightning_pipe.capture.steps.module_tables import canonical_names
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.capture.steps.step_function import StepRecording, loss_of, recording_calls
from lightning_pipe.capture.torch_private import TorchDispatchMode, checkpoint_only, operator_name


@dataclass(frozen=True)
class EagerReference:
    """What a plain run gave.

    Attributes:
        loss: of these samples.
        gradients: by canonical name; of parameters that got one.
        coarsest: the least exact floating type of all that forward computed.
        unmatched: "" if the same random numbers were drawn as by the captured step, else why not.
    """

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    coarsest: torch.dtype
    unmatched: str


def run_plainly(
    captured: Capture | Replay, request: Request, tensors: Sequence[torch.Tensor], key: RandomKey
) -> EagerReference:
    """Run a training step forward and backward; gradients of the module must be None before and are afterwards.

    Buffers, attributes and whatever else the step changes are left as it leaves them; generators are as before.

    Args:
        captured: the same step, captured.
        request: what was captured; its module is whole, and on `request.device`.
        tensors: leaves of the batch, of some samples, on that device.
        key: key of the random numbers.
    """
    module, exactness = request.module, _Exactness()
    dice = GraphDice(captured, key, request.device) if isinstance(captured, Capture) else None
    source = _units_seeded(captured.trace, request, key) if isinstance(captured, Replay) else dice
    with contextlib.ExitStack() as stack:
        scene = (undisturbed(request.device), torch.enable_grad(), recording_calls(module, StepRecording()))
        for entered in (*scene, no_collectives()):
            stack.enter_context(entered)
        if dice is not None:  # the graph keeps what a checkpoint would compute again
            stack.enter_context(checkpoint_only(lambda: False))
        for entered in (request.context(), exactness, source):
            stack.enter_context(entered)
        output = getattr(module, request.method)(request.structure.fill(tensors), *request.arguments)
        output = with_loss(request.method, output)
    loss = loss_of(module, request.method, output)
    assert loss is not None, "a training step returns a loss"
    loss.backward()  # type: ignore[no-untyped-call]
    parameters = {name: module.get_parameter(name) for name in dict.fromkeys(canonical_names(module).values())}
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return EagerReference(loss.detach(), gradients, exactness.coarsest, "" if dice is None else dice.unmatched())


class GraphDice(TorchDispatchMode):
    """Seed the generator before every random operation of a plain step as the captured graph does.

    Dropout of the plain step on a host is a `bernoulli_` where the graph has the fused operator; it gets that one's
    mask.

    Args:
        capture: the graph.
        key: key of the random numbers.
        device: where the graph draws.
    """

    def __init__(self, capture: Capture, key: RandomKey, device: torch.device) -> None:
        super().__init__()
        self._expected = [operator_name(node) for node in capture.joint.module.graph.nodes if is_random(node)]
        self._key, self._device = key, device
        self._drawn = 0
        self._reason = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, with the numbers of the graph's if it is random."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        number, name = self._drawn, _plain_name(func.__name__.partition(".")[0])
        self._drawn += 1
        expected = _plain_name(self._expected[number]) if number < len(self._expected) else "nothing"
        is_dropout = (name, expected) == ("bernoulli", "native_dropout")
        if name != expected and not is_dropout:
            self._note(f"draw {number + 1} is {name} in the plain step and {expected} in the graph")
        elif kwargs.get("generator") is not None:
            self._note(f"draw {number + 1} ({name}) is from a generator of the step's own")
        return drawing(_fill_with_mask if is_dropout else func, number, self._device)(self._key, *args, **kwargs)

    def unmatched(self) -> str:
        """Return "" if all random operations were those of the graph, else which is not."""
        if not self._reason and self._drawn != len(self._expected):
            self._note(f"it makes {self._drawn} draws in the plain step and {len(self._expected)} in the graph")
        return self._reason

    def _note(self, reason: str) -> None:
        self._reason = self._reason or reason


def _fill_with_mask(noise: torch.Tensor, keep: float = 0.5, **_: Any) -> torch.Tensor:
    """Fill with the mask of the fused dropout."""
    return noise.copy_(torch.native_dropout(torch.ones_like(noise), 1 - keep, True)[1])


def _plain_name(name: str) -> str:
    """Return the name of a random operator without what tells whether it draws into a tensor of the caller."""
    return name.removesuffix("_").removesuffix("_functional")


class _Exactness(TorchDispatchMode):
    """Note the least exact floating type among the results of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and look at what it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.coarsest = max(self.coarsest, tensor.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return result


@contextlib.contextmanager
def _units_seeded(trace: UnitTrace, request: Request, key: RandomKey) -> Iterator[None]:
    """Seed all generators before the step, and before and after every unit, as a play of the step does."""
    units = _Units(trace, request, key)
    with (
        keyed(key, request.device),
        checkpoint_only(lambda: units.is_inside),
        mock.patch.object(nn.Module, "__call__", units.interceptor()),
    ):
        yield


class _Units:
    """Count the units that a plain step calls, and seed around them."""

    def __init__(self, trace: UnitTrace, request: Request, key: RandomKey) -> None:
        called = {unit.path for unit in trace.units}
        self._units = {id(child) for path, child in request.module.named_modules() if path in called}
        self._key, self._device = key, request.device
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
            seed(self._key, 2 * number + 2, self._device)
            return result

        return call
