"""Rounds: forwards of the next batches run before the optimizer has stepped for this one (option `versions`).

Every training step is one round, which ends with the optimizer's step as ever. What runs ahead is decided before it
begins, alike on all ranks: batches that are known to follow, whose steps are the one at hand.

What a step reads besides tensors of its batch is foreseen: counters as they will be, everything else as it is. When
the turn of a batch comes it is compared; forwards that have read something else are given up and run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from lightning_pipe.core.plan import Plan
from lightning_pipe.core.program import Seam
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.weights.corrections import Correction
from lightning_pipe.schedule.weights import WeightPolicy
from lightning_pipe.strategy.ranks.connections import Connections
from lightning_pipe.strategy.steps.step_calls import FollowingBatch, RunOptions, StepRequest
from lightning_pipe.strategy.steps.step_runtime import RankStep
from lightning_pipe.strategy.versions.predicted_weights import PredictedWeights

_MOST_DIFFERENCES = 3  # batches in a row whose forwards ran again; then nothing runs ahead any more


@dataclass(frozen=True)
class Round:
    """What a round runs.

    Attributes:
        seam: what it takes over and leaves; None for a pipeline that is flushed.
        sizes: samples of its micro-batches, those of later batches too.
        following: the batches whose forwards begin in it.
    """

    seam: Seam | None
    sizes: tuple[int, ...]
    following: tuple[FollowingBatch, ...] = ()


class Rounds:
    """Decide what runs ahead, and know what is in flight.

    Args:
        versions: the policy's name; "sync" for none.
        links: to the other ranks.
        policy: that policy with the user's options.

    Attributes:
        policy: the policy; None for "sync".
        is_flushed: whether nothing may run ahead of the last batch, so that it was trained as with "sync".
        predicted: what predicts weights; None before there is an optimizer.
        correction: of late gradients, where the policy has one.
    """

    def __init__(self, versions: str, links: Connections, policy: WeightPolicy | None) -> None:
        self.policy = policy
        self.predicted: PredictedWeights | None = None
        self._versions, self._links = versions, links
        self._flying: RankStep | None = None  # whose forwards are in flight
        self._expected: tuple[FollowingBatch, ...] = ()  # batches that they belong to
        self._buffers: dict[str, tuple[torch.Tensor, int]] = {}  # that they have read, with the writes to each
        self._differences = 0  # in a row
        self._changing = ""  # what was never as foreseen
        self._flushed: set[str] = set()
        self.is_flushed = False
        self.correction: Correction | None = None

    def lookahead(self, plan: Plan) -> int:
        """Return how many batches behind the one at hand may be needed."""
        if self.policy is None:
            return 0
        ahead = max(self.policy.ahead(plan.layout, plan.microbatches))
        return -(-ahead // plan.microbatches)

    def begin(
        self,
        step: RankStep,
        call: StepRequest,
        sizes: tuple[int, ...],
        turn: RunOptions,
        *,
        training: bool,
        numbers: tuple[float, ...],
    ) -> Round:
        """Return what the round of a batch runs; what is in flight and not of this round is given up.

        Args:
            step: of the batch.
            call: of the step.
            sizes: samples of its micro-batches.
            turn: the batch, and those that follow.
            training: whether it makes gradients.
            numbers: that the step reads.
        """
        if self.policy is None or not training:
            return Round(None, sizes)
        if step.split.traffic.head is not None and self._flying is None:  # a program of its own, which is flushed
            self.is_flushed = self._is_flushed(step.why_not_ahead)
            return Round(None, sizes)
        step.prove_rounds(self.policy, sizes)
        if self.predicted is not None:
            step.executor.versions.prediction = self.predicted.of(self.policy, step.plan)
        if self.correction is not None and self.correction.kind == "discrepancy":
            step.executor.versions.prediction = self.correction
        if self._flying is not None:
            self._look_back(step, call, sizes, turn, numbers)
        why_not = turn.why_not_ahead or step.why_not_ahead or self._changing
        self.is_flushed = turn.warms_up or self._is_flushed(why_not)
        following = [] if self.is_flushed else self._alike(step, turn.following)
        batches = [batch.sizes for batch in following]
        enters = () if self._flying is None else step.executor.in_flight
        seam = self.policy.seam(step.layout, len(sizes), enters=enters, following=[*map(len, batches)])
        if self.correction is not None:
            self.correction.is_ahead = not self.is_flushed
        later = [size for batch in batches for size in batch][: max(seam.leaves)]
        self._flying = step if any(seam.leaves) else None
        self._expected = tuple(following)
        return Round(seam, (*sizes, *later), tuple(following))

    def end(self) -> None:
        """Note what forwards in flight have read, once the round has run."""
        self._buffers = {} if self._flying is None else self._flying.buffer_versions()

    def _look_back(
        self, step: RankStep, call: StepRequest, sizes: tuple[int, ...], turn: RunOptions, numbers: tuple[float, ...]
    ) -> None:
        """Give up forwards in flight that are of another batch than the one at hand, or have read something else."""
        expected = self._expected[0]
        if not turn.continues or (expected.number, expected.sizes) != (turn.number, sizes):
            self.give_up()
            return
        assert self._flying is not None, "looked back at what is in flight"
        if step is not self._flying:
            why = self._flying.misfit(call)
        elif changed := self._changed(step, expected.numbers, numbers):
            why = f"{changed} changes from batch to batch"
        else:
            self._differences = 0
            return
        self._differences += 1
        if self._differences == _MOST_DIFFERENCES:
            self._changing = why
        self.give_up()

    def _changed(self, step: RankStep, foreseen: Sequence[float], numbers: Sequence[float]) -> str:
        """Return the name of what forwards in flight have read and has another value now; "" if nothing has."""
        for name, one, two in zip(step.capture.number_names, foreseen, numbers, strict=True):
            if one != two and (one == one or two == two):  # not-a-number is as foreseen
                return name
        for name, (buffer, writes) in step.buffer_versions().items():
            known, writes_then = self._buffers.get(name, (None, 0))
            if known is not buffer or writes != writes_then:
                return f"self.{name}"
        return ""

    def _alike(self, step: RankStep, following: Sequence[FollowingBatch]) -> list[FollowingBatch]:
        """Return the batches that follow up to the first one that another step takes."""
        first_other = next((k for k, batch in enumerate(following) if batch.step is not step), len(following))
        return [*following[:first_other]]

    def _is_flushed(self, why: str) -> bool:
        """Return whether there is a reason for which nothing may run ahead, and say it once."""
        if why and why not in self._flushed:
            self._flushed.add(why)
            rank_zero_warn(
                f"versions={self._versions!r} changes nothing for this training step, since {why}: the pipeline is "
                "flushed after every batch, as with versions='sync'."
            )
        return bool(why)

    def give_up(self) -> None:
        """Forget forwards in flight, so that the next batch begins with the weights of then; on all ranks together."""
        if self._flying is not None:
            with self._links.watch.limited("forwards in flight"):
                self._flying.executor.give_up_flight(wait=self._links.watch.wait)
        self._flying, self._expected, self._buffers = None, (), {}


def chained(jobs: Sequence[BatchInput]) -> BatchInput | None:
    """Return the first of some jobs, each with the next behind it."""
    job = None
    for batch in reversed(jobs):
        job = replace(batch, following=job)
    return job
