"""Check of a captured step against the plain one: once for every graph, before it runs, on some samples of its batch.

On rank 0, where the module is whole: the plain step, and the captured one, with the same random numbers. The loss, the
gradient of every parameter, buffers that change, and what is logged and returned are compared. Sums may be made in
another order, which costs the last digits; so, with eps the precision of the least exact floating type that forward
computes in,

    |captured - plain|  <=  eps^(1/2) * scale      half of the digits
    scale of a gradient  =  max(its own largest, eps^(1/4) * the largest of all)
    scale of the loss    =  max(|loss|, eps^(1/4))

A gradient that is zero but for rounding (of a bias before a normalisation) has no digits of its own; for it the second
term of the scale allows three quarters of the digits of the largest gradient. A mistake below that is not seen.

It costs two runs of a micro-batch, forward and backward, and for that long the memory of the whole module with two sets
of gradients and one set of activations. On a host where that much is not free, values and gradients are in files that
are mapped into memory, and no more than activations and a few gradients are in memory. Buffers, attributes, gradients
and generators are put back.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_pipe.capture import Request, Route
from lightning_pipe.capture.eager_reference import EagerReference, run_plainly
from lightning_pipe.capture.recording.unit_state import left_as_it_was
from lightning_pipe.capture.steps.hazards import restored_generators
from lightning_pipe.capture.steps.stage_program import RandomKey
from lightning_pipe.errors import CaptureError
from lightning_pipe.strategy.checks.captured_run import advice, run_captured
from lightning_pipe.strategy.checks.differences import Difference, compared, compared_reports
from lightning_pipe.strategy.lightning_private import located
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.start.mapped import MappedTensors
from lightning_pipe.strategy.start.on_device import move_module
from lightning_pipe.strategy.start.room import room_for_runs
from lightning_pipe.strategy.steps.captured import Captured
from lightning_pipe.strategy.steps.metrics import wrong_answer
from lightning_pipe.strategy.steps.step_calls import StepRequest
from lightning_pipe.units import format_bytes

log = logging.getLogger(__name__)

_FORWARDS = 10  # that two runs take, backwards and adding to gradients in files included
_MOST_ON_HOST_BYTES = 4 * 2**30  # of parameters; a GPU says itself when its memory is full, a host ends the process


class Incomparable(Exception):
    """The two cannot be compared; the text says why."""


@dataclass(frozen=True)
class Checked:
    """What came of a comparison that found no difference.

    Attributes:
        seconds: that it took.
        is_compared: whether the two were compared at all.
    """

    seconds: float
    is_compared: bool


def check_captured(
    captured: Captured, call: StepRequest, *, samples: int, control: ControlPlane, seed: int, deadline_s: float
) -> Checked:
    """Compare a captured step with the plain one on the first samples of a batch; on all ranks together.

    Args:
        captured: the step.
        call: what was captured; the module of rank 0 is whole.
        samples: number of samples to take.
        control: to the other ranks.
        seed: seed of the random numbers.
        deadline_s: for which other ranks wait.

    Raises:
        CaptureError: on every rank, if they differ, naming the worst parameter, and what to do.
    """
    mine = None if call.tensors is None else [tensor.cpu() for tensor in call.tensors]
    tensors = control.to_first(mine, source=call.holder, what="the batch by which the captured step is checked")

    def check() -> Checked:
        assert tensors is not None, "rank 0 was sent the batch"
        request = captured.request
        cut = request.structure.cut(request.batch_dim) if request.samples is not None else (False,) * len(tensors)
        first = [
            tensor.narrow(request.batch_dim, 0, samples) if along else tensor
            for tensor, along in zip(tensors, cut, strict=True)
        ]
        begin = time.perf_counter()
        is_compared = _check(captured.capture, request, first, samples=samples, seed=seed, deadline_s=deadline_s)
        return Checked(time.perf_counter() - begin, is_compared)

    return control.agreed(check, source=0, what="whether the captured step is right")


def _check(
    captured: Route, request: Request, tensors: Sequence[torch.Tensor], *, samples: int, seed: int, deadline_s: float
) -> bool:
    """Compare, and log the result or raise; return whether the two could be compared."""
    begin = time.perf_counter()
    try:
        found = differences(captured, request, tensors, samples=samples, seed=seed, deadline_s=deadline_s)
    except Incomparable as reason:
        log.warning("%s as captured is not compared with the plain step: %s.", request.method, reason)
        return False
    loss, worst, other = found
    if not all(difference.relative <= difference.allowed for difference in found):
        raise CaptureError(_refusal(captured, request, samples, *found))
    log.info(
        "%s as captured (%s) agrees with the plain step on the first micro-batch of %d samples: the loss differs by "
        "%.1e of itself, gradients by at most %.1e of the largest, buffers and reports by %.1e (%.1e is rounding in "
        "%s); compared in %.2f s.",
        *(request.method, captured.name, samples, loss.relative, worst.relative, other.relative, worst.allowed),
        *(_spelled(worst.dtype), time.perf_counter() - begin),
    )
    return True


def differences(
    captured: Route,
    request: Request,
    tensors: Sequence[torch.Tensor],
    *,
    samples: int,
    seed: int,
    deadline_s: float = math.inf,
) -> tuple[Difference, Difference, Difference]:
    """Return the difference of the loss, and the largest of a gradient, and of a buffer or a report.

    Args:
        captured: the step.
        request: what was captured; its module is whole.
        tensors: leaves of some samples.
        samples: their number.
        seed: seed of the random numbers.
        deadline_s: for which somebody waits.

    Raises:
        Incomparable: if the two cannot be run in time, or do not draw the same random numbers.
        CaptureError: if the captured step fails where the plain one does not.
    """
    key = RandomKey(seed, 0, 0)
    with on_one_device(captured, request, samples) as prepare:
        plain = plain_run(captured, request, prepare(tensors), key, deadline_s=deadline_s)
        sizes = _parts(captured, samples)
        run = run_captured(captured, request, prepare(tensors), sizes=sizes, key=key)
        if (guard := wrong_answer(captured.record, run.results[0])) is not None:
            raise Incomparable(
                f"the question at {guard.line} has another answer for the first samples than for the batch"
            )
        loss = run.batch[captured.record.loss] if captured.record.loss is not None else None
        assert loss is None or isinstance(loss, torch.Tensor), "a loss is a tensor"
        reports = compared_reports(captured, plain, run, samples=samples)
        return *compared(plain, loss, run.gradients), reports


def _parts(captured: Route, samples: int) -> tuple[int, ...]:
    """Return the parts in which samples are run: unequal ones, where these are to make what all make together."""
    is_one = captured.may_draw or captured.graph.coupled or captured.by_parts or captured.whole
    if not captured.is_exact or samples < 2 or is_one:
        return (samples,)
    fewer = max(1, (samples - 1) // 2)
    return samples - fewer, fewer


@contextlib.contextmanager
def on_one_device(
    captured: Route, request: Request, samples: int
) -> Iterator[Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]]:
    """Have the whole module on its device for some runs, each of which begins with the same state.

    Args:
        captured: the step.
        request: what was captured; its module is whole.
        samples: that a run takes at once, at most.

    Yields:
        A function to be called before every run: it returns copies of the leaves, and puts the module back. Gradients
        are None then, or zeros in a file.

    Raises:
        Incomparable: if the module cannot be run here.
    """
    module, device = request.module, request.device
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise Incomparable("the module is on the meta device")
    files = _files_of_gradients(captured, request, samples) if device.type == "cpu" else None
    with restored_generators(), left_as_it_was(module) as kept, located(module, device), kept.keeper:

        def prepare(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            kept.restore()
            move_module(module, device)
            for p in module.parameters():
                p.grad = files.zeros_if_possible(p) if files is not None and p.requires_grad else None
            return [tensor.detach().to(device, copy=True) for tensor in tensors]

        try:
            yield prepare
        except torch.OutOfMemoryError:
            raise Incomparable(f"the whole module and its gradients do not fit into the memory of {device}") from None


def _files_of_gradients(captured: Route, request: Request, samples: int) -> MappedTensors | None:
    """Return where gradients are on a host that has no room for them in memory; None where it has.

    Raises:
        Incomparable: if the step takes too long or too much memory there.
    """
    if refusal := too_large(request):
        raise Incomparable(refusal)
    graph = captured.graph
    made = sum(node.output_bytes for node in graph.nodes) * samples // graph.samples
    room = room_for_runs(request.module, made=made)
    if room.refusal:
        raise Incomparable(room.refusal)
    return room.files


def too_large(request: Request) -> str:
    """Return why a module would take too long to run on one rank; "" if it would not."""
    size = sum(parameter.nbytes for parameter in request.module.parameters())
    if request.device.type != "cpu" or size <= _MOST_ON_HOST_BYTES:
        return ""
    return (
        f"its parameters take {format_bytes(size)}, and two runs with gradients on one rank are for modules up to "
        f"{format_bytes(_MOST_ON_HOST_BYTES)}"
    )


def plain_run(
    captured: Route,
    request: Request,
    tensors: Sequence[torch.Tensor],
    key: RandomKey,
    *,
    matched: bool = True,
    deadline_s: float = math.inf,
) -> EagerReference:
    """Run the plain step, if it runs so early: hooks that prepare it may come later.

    Args:
        captured: the step.
        request: what was captured.
        tensors: leaves.
        key: of the random numbers.
        matched: whether these must be those of the captured step.
        deadline_s: for which somebody waits for this and a run of the captured step.

    Raises:
        Incomparable: if it does not run, or draws other random numbers, or its forward says that it takes too long.
    """
    begin = time.perf_counter()

    def look() -> None:
        if (expected_s := _FORWARDS * (time.perf_counter() - begin)) > deadline_s:
            raise Incomparable(f"it would take about {expected_s:.0f} s, and ranks wait for {deadline_s:.0f} s")

    try:
        plain = run_plainly(captured, request, tensors, key, before_backward=look)
    except (torch.OutOfMemoryError, Incomparable):
        raise
    except Exception as error:
        raise Incomparable(f"before training the plain step raises {type(error).__name__}: {error}") from error
    if matched and plain.unmatched:
        raise Incomparable(f"their random numbers cannot be made the same ({plain.unmatched})")
    return plain


def _refusal(
    captured: Route, request: Request, samples: int, loss: Difference, worst: Difference, other: Difference
) -> str:
    module = request.module
    found = f"its loss is {loss.captured:.9g} instead of {loss.plain:.9g}"
    if captured.record.loss is None or max(loss.relative, worst.relative) <= worst.allowed:
        place = other.name.partition(" (")[0]
        found = f"{place} has {other.captured:.9g} where it should have {other.plain:.9g}"
    elif worst.relative > worst.allowed:
        path = worst.name.rpartition(".")[0]
        where = f"{path}: {type(module.get_submodule(path)).__name__}" if path else type(module).__name__
        found += (
            f", and the gradient of {worst.name} (in {where}) has {worst.captured:.9g} where it should have "
            f"{worst.plain:.9g}"
        )
    return (
        f"{type(module).__name__}.{request.method}, captured by the route {captured.name}, gives other results than "
        f"the plain step: on the first micro-batch ({samples} samples, the same random numbers) {found}. That is "
        f"{max(loss.relative, worst.relative, other.relative):.1e} of the largest value, and rounding in "
        f"{_spelled(worst.dtype)} explains {worst.allowed:.1e}. {advice(captured)}"
    )


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
