"""Rounds: forwards of the next batches run before the optimizer has stepped for this one (option `versions`).

Every training step is one round, which ends with the optimizer's step as ever. What runs ahead is decided before it
begins, alike on all ranks: batches that are known to follow, whose steps are the one at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pipe.core.plan import Plan
from lightning_pipe.core.program import Seam
from lightning_pipe.lightning_names import rank_zero_warn
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.schedule.weights import POLICIES, WeightPolicy
from lightning_pipe.strategy.ranks.connections import Connections
from lightning_pipe.strategy.steps.step_calls import FollowingBatch, RunOptions
from lightning_pipe.strategy.steps.step_runtime import RankStep


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
    """

    def __init__(self, versions: str, links: Connections) -> None:
        self.policy: WeightPolicy | None = POLICIES.get(versions)
        self._versions, self._links = versions, links
        self._flying: RankStep | None = None  # whose forwards are in flight
        self._expected: tuple[tuple[int, ...], ...] = ()  # micro-batches of the batches that they belong to
        self._flushed: set[str] = set()

    def lookahead(self, plan: Plan) -> int:
        """Return how many batches behind the one at hand may be needed."""
        if self.policy is None:
            return 0
        ahead = max(self.policy.ahead(plan.layout, plan.microbatches))
        return -(-ahead // plan.microbatches)

    def begin(
        self,
        step: RankStep,
        sizes: tuple[int, ...],
        turn: RunOptions,
        *,
        training: bool,
        reads_numbers: bool,
    ) -> Round:
        """Return what the round of a batch runs; what is in flight and not of this round is given up.

        Args:
            step: of the batch.
            sizes: samples of its micro-batches.
            turn: the batch, and those that follow.
            training: whether it makes gradients.
            reads_numbers: whether the step reads numbers that change, such as the number of the batch.
        """
        if self.policy is None or not training:
            return Round(None, sizes)
        step.prove_rounds(self.policy, sizes)
        if not turn.continues or step is not self._flying or self._expected[:1] != (sizes,):
            self.give_up()
        numbers = "it reads numbers that change from batch to batch" if reads_numbers else ""
        is_flushed = self._is_flushed(turn.why_not_ahead or numbers or step.why_not_ahead)
        following = [] if is_flushed else self._alike(step, turn.following)
        batches = [batch.sizes for batch in following]
        enters = () if self._flying is None else step.executor.in_flight
        seam = self.policy.seam(step.layout, len(sizes), enters=enters, following=[*map(len, batches)])
        later = [size for batch in batches for size in batch][: max(seam.leaves)]
        self._flying = step if any(seam.leaves) else None
        self._expected = tuple(batches)
        return Round(seam, (*sizes, *later), tuple(following))

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
        self._flying, self._expected = None, ()


def chained(jobs: Sequence[BatchInput]) -> BatchInput | None:
    """Return the first of some jobs, each with the next behind it."""
    job = None
    for batch in reversed(jobs):
        job = replace(batch, following=job)
    return job
