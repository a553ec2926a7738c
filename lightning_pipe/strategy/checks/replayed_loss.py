"""Losses of replayed steps without a head: what cutting a batch changes, measured once before training.

On rank 0, where the module is whole: the plain step on all samples of the first batch, and its plays as a single stage
on the micro-batches of the plan, weighed as in training. Loss and gradients are compared as in `check`, whose
tolerances hold here too. The numbers decide whether a loss is a mean or a sum over samples:

    one of the two gives what the whole batch gives      that is its role
    neither does                                         the mean, and the difference is said

What is the same in all micro-batches of one batch (the count of a class, an extreme) hides such a difference. So the
samples are then sorted by what tells them apart, which makes micro-batches as unlike each other as they can be, and
compared once more; and so in some other orders.

Random numbers belong to micro-batches, so both runs get none: noise is a constant and dropout drops nothing.

It costs a run of the whole batch and some of all micro-batches, and is left out, saying so, where these would take too
long or too much memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from lightning_pipe.capture import Request, Route
from lightning_pipe.capture.recording.no_randomness import NoRandomness
from lightning_pipe.capture.route import Plays
from lightning_pipe.capture.steps.batch import sorted_samples
from lightning_pipe.capture.steps.stage_program import RandomKey, Split
from lightning_pipe.core.program import Layout
from lightning_pipe.errors import CaptureError
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.strategy.checks.captured_run import run_captured
from lightning_pipe.strategy.checks.check import Incomparable, on_one_device, plain_run
from lightning_pipe.strategy.checks.differences import Difference, compared
from lightning_pipe.strategy.ranks.control_plane import ControlPlane
from lightning_pipe.strategy.steps.captured import AS_ACCUMULATION, Captured
from lightning_pipe.strategy.steps.merge_logs import unequally_divided
from lightning_pipe.strategy.steps.metrics import wrong_answer
from lightning_pipe.strategy.steps.step_calls import StepRequest

log = logging.getLogger(__name__)

Role = Literal["mean", "sum"]
_MOST_SECONDS = 60.0
_RANDOM_SECONDS = 2.0  # for random orders of the samples of a batch, after the others
_SMALL = 32  # samples of a batch of which more orders are looked at: what is right for few of them is so by chance
_MIXING = "A sub-module, or the loss, compares samples or combines them otherwise than by a sum or a mean."
_OTHER: dict[Role, Role] = {"mean": "sum", "sum": "mean"}


class CutLossError(CaptureError):
    """A loss of the parts of a batch is not that of the batch, and cannot be made of them.

    Attributes:
        reason: why, to follow "since".
    """

    def __init__(self, message: str, *, reason: str = "") -> None:  # a default, since errors are sent to other ranks
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Cut:
    """What cutting does to a step.

    Attributes:
        role: how losses of the parts are combined.
        is_told: whether it was told that the parts do not give what the whole gives.
        is_as_expected: whether it changes nothing, and the loss is combined as its operations say.
        harmless: lines where a replayed step divides by what differs between parts, which give what the whole gives.
    """

    role: Role
    is_told: bool = False
    is_as_expected: bool = False
    harmless: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Measured:
    """By how much micro-batches differ from the whole batch.

    Attributes:
        role: how losses of micro-batches are combined for that.
        loss, worst: differences of the loss, and of the gradient that differs most.
        unequal: lines where a replayed step divides by what differs between micro-batches.
        is_sorted: whether the samples were sorted.
    """

    role: Role
    loss: Difference
    worst: Difference
    unequal: tuple[str, ...] = ()
    is_sorted: bool = False

    @property
    def relative(self) -> float:
        """Return the larger difference in units of its scale."""
        return max(self.loss.relative, self.worst.relative)

    @property
    def agrees(self) -> bool:
        """Return whether rounding explains it."""
        return self.relative <= self.worst.allowed


def cut_by_numbers(
    captured: Captured,
    call: StepRequest,
    *,
    sizes: tuple[int, ...],
    control: ControlPlane,
    seconds: float,
) -> Cut | None:
    """Return what cutting a batch does, None if that was not measured; on all ranks together.

    Args:
        captured: the step.
        call: what was captured; the module of rank 0 is whole, and rank 0 has the tensors of the batch.
        sizes: samples of the micro-batches.
        control: to the other ranks.
        seconds: what running the plain and the captured step on one micro-batch has taken.

    Raises:
        CutLossError: on every rank, if a replayed loss divides by what differs between micro-batches, or a loss is a
            number for the batch and none for a micro-batch.
    """

    def decide() -> Cut | None:
        assert call.tensors is not None, "rank 0 has looked at the batch"
        request, begin, known = captured.request, time.perf_counter(), plays_of(captured).loss_role
        try:
            expected_s = seconds * sum(sizes) / max(sizes)
            if expected_s > _MOST_SECONDS:
                raise Incomparable(f"it would take about {expected_s:.0f} s")
            tensors = _first_samples(call.tensors, request, sum(sizes))
            found = measure(captured.capture, request, tensors, sizes=sizes, role=known)
        except Incomparable as reason:
            log.warning("What cutting a batch into %d parts changes is not measured: %s.", len(sizes), reason)
            return None
        _tell(captured, found, known, len(sizes), time.perf_counter() - begin)
        harmless = frozenset(found.unequal if found.agrees else ())
        expected = found.agrees and found.role == known
        return Cut(found.role, is_told=not found.agrees, is_as_expected=expected, harmless=harmless)

    return control.agreed(decide, source=0, what="what micro-batches change")


def fewest_samples(captured: Captured, call: StepRequest, *, control: ControlPlane) -> int:
    """Return how many samples a part of a batch needs, as far as two samples tell: 1 or 2; on all ranks together.

    Of a single sample there is no variance, and batch statistics are refused: a loss that is a number for two samples
    and none for each of them needs parts of two.

    Args:
        captured: the step.
        call: what was captured; the module of rank 0 is whole, and rank 0 has the tensors of the batch.
        control: to the other ranks.
    """

    def decide() -> int:
        assert call.tensors is not None, "rank 0 has looked at the batch"
        capture, request = captured.capture, captured.request
        if request.samples is None or capture.misfit(1) or capture.misfit(2):
            return 1
        with contextlib.suppress(Incomparable):
            tensors = _first_samples(call.tensors, request, 2)
            if _is_finite(capture, request, tensors, (2,)) and not _is_finite(capture, request, tensors, (1, 1)):
                return 2
        return 1

    return control.agreed(decide, source=0, what="how many samples a micro-batch needs")


def _is_finite(captured: Route, request: Request, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> bool:
    """Return whether micro-batches of these sizes have a loss and gradients, and these are numbers."""
    no_randomness = NoRandomness()  # type: ignore[no-untyped-call]  # torch's constructor has no types
    with on_one_device(captured, request, sum(sizes)) as prepare, no_randomness, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a variance of one number
        try:
            ran = run_captured(captured, request, prepare(tensors), sizes=sizes, key=RandomKey(0, 0, 0))
        except CaptureError:
            return False
    _, gradients, loss = ran
    found = (t if t.layout == torch.strided else t.to_dense() for t in (loss, *gradients.values()))
    return all(bool(tensor.isfinite().all()) for tensor in found)


def warn_of_fewer_parts(captured: Captured, least: int, *, wanted: int, count: int) -> None:
    """Warn that a batch is cut into fewer micro-batches than wanted, since a single sample has no loss."""
    if count < wanted:
        rank_zero_warn(
            f"A batch is cut into {count} micro-batches, not {wanted}: {captured.request.method} has no loss or no "
            f"gradient for a single sample (a variance, batch statistics), so that each has at least {least}."
        )


def plays_of(captured: Captured) -> Plays:
    """Return what the plays of a replayed step say."""
    assert captured.capture.plays is not None, "a replayed step"
    return captured.capture.plays


def _first_samples(tensors: Sequence[torch.Tensor], request: Request, samples: int) -> list[torch.Tensor]:
    cut = request.structure.cut(request.batch_dim)
    return [t.narrow(request.batch_dim, 0, samples) if c else t for t, c in zip(tensors, cut, strict=True)]


def kept_by_replicas(captured: Captured, split: Split, layout: Layout) -> list[str]:
    """Name the buffers that replicas would change for their own samples, and whose mean no device would have."""
    averaged = set(captured.capture.averaged_buffers())
    replicated = (program for program in split.stages if len(layout.stages[program.stage]) > 1)
    return sorted(averaged & {name for program in replicated for name in program.mutations})


def measure(
    captured: Route,
    request: Request,
    tensors: Sequence[torch.Tensor],
    *,
    sizes: tuple[int, ...],
    role: Role,
) -> Measured:
    """Compare the plain whole batch with the captured micro-batches, as means or as sums, whichever is nearer.

    Args:
        captured: the step.
        request: what was captured; its module is whole.
        tensors: leaves of the batch.
        sizes: samples of the micro-batches.
        role: what the loss is taken for; the other is tried if this one does not agree. Where neither does, what the
            operations of the loss say stays: its gradient may have terms that they do not show.

    Raises:
        Incomparable: if the two cannot be run.
    """
    key = RandomKey(0, 0, 0)
    plays = captured.plays
    assert plays is not None, "a replayed step"
    if plays.is_random_in_python:
        raise Incomparable("the step draws random numbers of Python or NumPy, which are others in every micro-batch")
    no_randomness = NoRandomness() if captured.may_draw else contextlib.nullcontext()  # type: ignore[no-untyped-call]
    with on_one_device(captured, request, sum(sizes)) as prepare, no_randomness:
        plain = plain_run(captured, request, prepare(tensors), key, matched=False)

        def cut(leaves: Sequence[torch.Tensor], one: Role) -> Measured:
            results, gradients, loss = run_captured(captured, request, prepare(leaves), sizes=sizes, key=key, role=one)
            if any(wrong_answer(captured.record, result) is not None for result in results):
                raise Incomparable("a question that the step asks of its tensors has another answer for a micro-batch")
            return Measured(one, *compared(plain, loss, gradients), tuple(unequally_divided(plays.said())))

        if not (found := cut(tensors, role)).agrees:
            other = cut(tensors, _OTHER[role])
            if other.agrees:
                found = other
        begin = time.perf_counter()
        for number, ordered in enumerate(_other_orders(tensors, request)):
            if not found.agrees or (number > 1 and time.perf_counter() - begin > _RANDOM_SECONDS):
                break
            with contextlib.suppress(Incomparable, CaptureError):  # nobody said that this order of samples can be run
                again = replace(cut(ordered, found.role), is_sorted=True)
                found = replace(found, unequal=(*found.unequal, *again.unequal)) if again.agrees else again
    return found


def _other_orders(tensors: Sequence[torch.Tensor], request: Request) -> Iterator[list[torch.Tensor]]:
    """Yield the batch with its samples in other orders: by class or mask, every second one first, and at random.

    Neighbours, which are in one micro-batch, are others then: what happens to be right for some (that as many of the
    hardest samples are in each micro-batch, as half of all orders of eight have it) is not so for all.
    """
    along = request.structure.cut(request.batch_dim)
    if (by_kind := sorted_samples(tensors, along, request.batch_dim)) is not None:
        yield by_kind
    count = next((t.shape[request.batch_dim] for t, c in zip(tensors, along, strict=True) if c), 0)
    dice = random.Random(0)  # of Python's, since torch draws nothing while steps are compared
    shuffled = [dice.sample(range(count), count) for _ in range(8 if count <= _SMALL else 2)]
    for order in ([*range(0, count, 2), *range(1, count, 2)], *shuffled):
        index = torch.tensor(order)
        yield [
            t.index_select(request.batch_dim, index.to(t.device)) if c else t
            for t, c in zip(tensors, along, strict=True)
        ]


def _tell(captured: Captured, found: Measured, known: Role, count: int, seconds: float) -> None:
    method, plays = captured.request.method, plays_of(captured)
    if found.agrees:
        log.info(
            "%d micro-batches, combined as a %s, have the loss and the gradients of the whole first batch: they differ "
            "by at most %.1e; measured in %.2f s.",
            *(count, found.role, found.relative, seconds),
        )
        return
    order = ", with its samples in another order," if found.is_sorted else ""
    text = (
        f"{count} micro-batches do not give what the whole batch gives: on the first batch{order} the loss of {method} "
        f"is {found.loss.captured:.6g} instead of {found.loss.plain:.6g} (relative difference "
        f"{found.loss.relative:.1e}), and the gradient of {found.worst.name or 'no parameter'} differs most, by "
        f"{found.worst.relative:.1e} of its largest value."
    )
    if not found.is_sorted and (why := _unweighable(plays, found)):
        raise CutLossError(
            f"{text} The loss {why}, which a replayed step cannot weigh. "
            'Set microbatches=1, or capture="joint" if the step can be one graph; check=false trains all the '
            "same.",
            reason=f"its loss {why}, which a replayed step cannot weigh",
        )
    if not found.is_sorted and math.isfinite(found.loss.plain) and not math.isfinite(found.loss.captured):
        raise CutLossError(
            f"{text} {_MIXING} Training would make all weights NaN. Set microbatches=1, or use fewer "
            "micro-batches; check=false trains all the same.",
            reason="its loss is a number for the batch and none for a micro-batch",
        )
    rank_zero_warn(f"{text} {_MIXING} {AS_ACCUMULATION}")


def _unweighable(plays: Plays, found: Measured) -> str:
    if found.unequal:
        return f"divides by what differs between micro-batches at {found.unequal[0]}"
    return "adds sums over samples to terms of another kind" if plays.has_unweighed_terms else ""
