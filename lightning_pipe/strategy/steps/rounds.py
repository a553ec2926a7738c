"""Rounds: forwards of the next batches run before the optimizer has stepped for this one (option `versions`).

Every training step is one round, which ends with the optimizer's step as ever. What runs ahead is decided before it
begins, alike on all ranks: batches that are known to follow, whose steps are the one at hand.

What a step reads besides tensors of its batch is foreseen: counters as they will be, everything else as it is. When
the turn of a batch comes it is compared; forwards that have read something else are given up and run again.

Numbers of Python are alike on all ranks, and compared before the round. Buffers and the batch are compared by content,
on the ranks that have them: these tell the others with the results of the round, which is then taken back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
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
from lightning_pipe.strategy.versions.noted_contents import NotedContents, any_of
from lightning_pipe.strategy.versions.predicted_weights import PredictedWeights

_MOST_GIVEN_UP = 3  # batches in a row whose forwards ran again; then nothing runs ahead any more


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
        self._state = NotedContents({})  # buffers that they have read, as the last round has left them
        self._written = NotedContents({})  # buffers that stages write, as the round at hand has found them
        self._outdated: dict[str, torch.Tensor] = {}  # whether others have written to what was read, by reason
        self._given_up = 0  # in a row
        self._changing = ""  # why forwards were given up three times
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
        if self._flying is None:
            self._outdated.clear()
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

    @property
    def is_outdated(self) -> torch.Tensor | float:
        """Return whether forwards of the round's batch have read what this rank knows to be otherwise by its turn."""
        return any_of(self._outdated.values())

    def end(self, step: RankStep, *, has_entered: bool, is_outdated: bool) -> None:
        """Note what forwards in flight have read, once the round has run; or take its state back, on all ranks.

        Args:
            step: that has run.
            has_entered: whether forwards of its batch had run in earlier rounds.
            is_outdated: whether these have read something else than there was by its turn, on any rank.
        """
        if is_outdated:
            self._written.put_back(step.state_now())
            self.give_up(self._agreed_reason())
        elif has_entered:
            self._given_up = 0
        self._outdated.clear()
        self._state = NotedContents({} if self._flying is None else self._flying.state_now())

    def _agreed_reason(self) -> str:
        """Return why forwards are given up, which only some ranks have seen."""
        control = self._links.control
        mine = next((reason for reason, flag in self._outdated.items() if flag), "")
        reasons = [control.broadcast(mine, source=rank, what="what has changed") for rank in range(control.ranks)]
        return next(filter(None, reasons))

    @contextlib.contextmanager
    def weights_watched(self, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Let hooks read weights inside; forwards in flight are of no use if they write some."""
        if self._flying is None:
            yield
            return
        noted = NotedContents(weights)
        yield
        flags = {f"a hook writes the weights of {name}": flag for name, flag in noted.unlike(weights).items()}
        for reason, flag in flags.items():
            self._outdated[reason] = flag | self._outdated.get(reason, False)

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
            self.give_up(self._flying.misfit(call))
        elif changed := self._changed(step, expected.numbers, numbers):
            self.give_up(f"{changed} changes from batch to batch")
        else:
            flags = self._state.unlike(step.state_now())
            self._outdated |= {f"self.{name} changes from batch to batch": flag for name, flag in flags.items()}
            if turn.has_changed is not None:
                self._outdated["a hook changes the batch after its transfer to the device"] = turn.has_changed
            self._written = NotedContents(step.state_now(written=True))

    def _changed(self, step: RankStep, foreseen: Sequence[float], numbers: Sequence[float]) -> str:
        """Return the name of a number that forwards in flight have read and is another one now; "" without one."""
        for name, one, two in zip(step.capture.number_names, foreseen, numbers, strict=True):
            if one != two and (one == one or two == two):  # not-a-number is as foreseen
                return name
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

    def give_up(self, why: str = "") -> None:
        """Forget forwards in flight, so that the next batch begins with the weights of then; on all ranks together.

        Args:
            why: what makes them useless, which counts if there are any; "" where a batch was the last for a while.
        """
        if self._flying is not None:
            with self._links.watch.limited("forwards in flight"):
                self._flying.executor.give_up_flight(wait=self._links.watch.wait)
            self._given_up += bool(why)
            if self._given_up == _MOST_GIVEN_UP:
                self._changing = why
        self._flying, self._expected = None, ()


def chained(jobs: Sequence[BatchInput]) -> BatchInput | None:
    """Return the first of some jobs, each with the next behind it."""
    job = None
    for batch in reversed(jobs):
        job = replace(batch, following=job)
    return job
