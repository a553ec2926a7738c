"""What is asked of a pipeline, and what comes back: one call of a step, one run of it on a batch, and its result."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from lightning_pipe.capture import Request, Structure, real_answers
from lightning_pipe.capture.steps.batch import numbers_in
from lightning_pipe.capture.steps.record import StepRecord
from lightning_pipe.capture.text_fields import texts
from lightning_pipe.capture.tracked.number_expressions import Situation
from lightning_pipe.core.program import VerifiedProgram
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.lightning_names import Precision
from lightning_pipe.runtime.exchanges.slicing import Content
from lightning_pipe.strategy.start.on_device import run_on_device

if TYPE_CHECKING:
    from lightning_pipe.strategy.steps.step_runtime import RankStep

TRAINING = "training_step"


@dataclass(frozen=True)
class StepRequest:
    """One call of a step.

    Attributes:
        method: name of the step.
        structure: the batch without its tensors, the same on all ranks.
        arguments: positional arguments after the batch.
        answers: returns, on rank 0, the truth values that the step asks for on real tensors; None where no real run is
            possible.
        tensors: leaves of the batch, on the ranks that have them; None elsewhere.
        holder: a rank that has them.
        steps_ahead: optimizer steps before its batch has its turn.
    """

    method: str
    structure: Structure
    arguments: tuple[int, ...]
    answers: Callable[[Request], tuple[bool, ...]] | None = None
    tensors: tuple[torch.Tensor, ...] | None = None
    holder: int = 0
    steps_ahead: int = 0

    @cached_property
    def situation(self) -> Situation:
        """Return what numbers that vary are read from."""
        template = self.structure.template
        if self.structure.form is not None:  # nothing but tensors
            return Situation(self.arguments, steps=self.steps_ahead)
        return Situation(self.arguments, numbers_in(template), texts(template), self.steps_ahead)


@dataclass(frozen=True)
class FollowingBatch:
    """A training batch behind the one at hand.

    Attributes:
        call: of its step.
        tensors: leaves of the batch; None in their place on ranks that do not load.
        number: as of `RunOptions`.
        weight: as of `RunOptions`.
        at_turn: has the module inside as hooks of the batch's transfer leave it for its turn.
        step: that takes it; None if that is not known.
        sizes: samples of its micro-batches.
        cut: which leaves are cut into samples.
        numbers: that its step will read, as they are foreseen.
    """

    call: StepRequest
    tensors: tuple[Content | None, ...]
    number: int
    weight: float
    at_turn: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    step: RankStep | None = None
    sizes: tuple[int, ...] = ()
    cut: tuple[bool, ...] = ()
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class RunOptions:
    """What is special about one run.

    Attributes:
        tensors: leaves of the batch; None in their place on ranks that do not load.
        number: number of the batch, part of the key of random numbers.
        weight: share of the batch in the step's loss.
        synchronise: whether gradients are summed over ranks.
        record: whether a timeline is wanted.
        measure_memory: whether memory is measured, which makes the step slow.
        leave_sums: whether sums may be left under way, for which `Runner.land` waits.
        following: batches that follow, where forwards may run ahead.
        continues: whether the batch was the first of those that followed the last.
        why_not_ahead: why no batches may be looked at before their turn; "" if they may.
        warms_up: whether the pipeline is flushed as the user has asked.
        has_changed: whether hooks have changed the batch since forwards may have read it; None where that is not known.
        stop: says whether this rank is asked to stop; all hear of it with the results.
        confirm: called before this rank waits for another one, and before results are used: raises if its batch is not
            that of the other ranks.
    """

    tensors: tuple[Content | None, ...]
    number: int
    weight: float = 1.0
    synchronise: bool = True
    record: bool = False
    measure_memory: bool = False
    leave_sums: bool = False
    following: tuple[FollowingBatch, ...] = ()
    continues: bool = False
    why_not_ahead: str = ""
    warms_up: bool = False
    has_changed: torch.Tensor | None = None
    stop: Callable[[], bool] = bool
    confirm: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class StepSaid:
    """What a step has said of a batch.

    Attributes:
        record: what the step said.
        values: its outputs, on every rank.
        samples: samples of the batch.
    """

    record: StepRecord
    values: Mapping[str, Content]
    samples: int


@dataclass(frozen=True)
class StepResult(StepSaid):
    """What is known after a run of a program, besides what the step has said.

    Attributes:
        graph: fingerprint of the captured step.
        program: what was run.
        timeline: of this rank, if recorded.
        held: (time, bytes that the stages of this rank held from then on), if memory was measured.
        peak_bytes: most bytes that tensors of this rank took beyond what was there before, if memory was measured.
        state_bytes: bytes of parameters, gradients and buffers of this rank before the run, if memory was measured.
        stop: whether any rank was asked to stop when it had run its forwards.
        differing: what was not the same for all micro-batches and is one thing for the batch; "" if nothing was.
        is_unlike_trace: whether a play on any rank has changed what the traced run has not: a buffer, an attribute.
    """

    graph: str
    program: VerifiedProgram
    timeline: Timeline
    held: tuple[tuple[float, int], ...] = ()
    peak_bytes: int | None = None
    state_bytes: int = 0
    stop: bool = False
    differing: str = ""
    is_unlike_trace: bool = False

    @property
    def is_skipped(self) -> bool:
        """Return whether a training step returned None."""
        return self.record.loss is None


def step_contexts(plugin: Precision) -> Mapping[str, Callable[[], AbstractContextManager[Any]]]:
    """Return the context of each step: the precision plug-in's, and no gradients in evaluation."""

    def without_gradients(own: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
        @contextlib.contextmanager
        def context() -> Any:
            with torch.no_grad(), own():
                yield

        return context

    return {
        TRAINING: plugin.train_step_context,
        "validation_step": without_gradients(plugin.val_step_context),
        "test_step": without_gradients(plugin.test_step_context),
        "predict_step": without_gradients(plugin.predict_step_context),
    }


def answers_of(tensors: Sequence[torch.Tensor]) -> Callable[[Request], tuple[bool, ...]]:
    """Answer the questions of a step by running it on this batch, where the whole module is."""
    return lambda request: run_on_device(real_answers, request, tensors)
