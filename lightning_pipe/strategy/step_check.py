"""Check of captured steps against the plain step: each graph once, where rank 0 has room; on all ranks together."""

from __future__ import annotations

import logging

from lightning_pipe.strategy.checks.captured_run import cut_up
from lightning_pipe.strategy.checks.check import Checked, check_captured, too_large
from lightning_pipe.strategy.plans.batch_cuts import BatchCuts
from lightning_pipe.strategy.plans.kept_checks import KeptCheck
from lightning_pipe.strategy.steps.captured import Captured
from lightning_pipe.strategy.steps.step_calls import StepRequest
from lightning_pipe.strategy.steps.step_capture import RankSetup
from lightning_pipe.strategy.steps.step_runtime import slices

log = logging.getLogger(__name__)

_FEWEST = 3  # samples of a check: two unequal parts; of a single one there is no variance


class StepCheck:
    """Compare captured steps with the plain ones.

    Args:
        setup: of this rank.
        cuts: how batches are cut.

    Attributes:
        seed: of the random numbers.
    """

    def __init__(self, setup: RankSetup, cuts: BatchCuts) -> None:
        self._setup, self._cuts, self.seed = setup, cuts, 0

    def check(self, captured: Captured, call: StepRequest, samples: int) -> None:
        """Compare a captured step with the plain one, if there is room, and no earlier start has.

        Args:
            captured: the step.
            call: what was captured.
            samples: of its batch.

        Raises:
            CaptureError: on every rank, if they differ.
        """
        control, weights = self._setup.links.control, self._setup.weights
        room = weights.room()
        if refusal := control.broadcast(
            too_large(captured.request) or room.refusal, source=0, what="what rank 0 has room for"
        ):
            log.warning("%s as captured is not compared with the plain step: %s.", call.method, refusal)
            return
        try:
            with weights.whole(placed=room.placed):
                self._compare_or_remember(captured, call, samples)
        finally:
            cut_up.forget(captured.capture)

    def _compare_or_remember(self, captured: Captured, call: StepRequest, samples: int) -> None:
        config, control = self._setup.config, self._setup.links.control
        folder = None if config.cache_dir is None or control.rank > 0 else config.cache_dir / "checks"
        kept = KeptCheck(folder, captured, call, cuts=self._cuts, seed=self.seed)
        looks = not config.recheck
        known = control.agreed(lambda: kept.look() if looks else None, source=0, what="the check of an earlier start")
        if known is not None:
            log.info(
                "%s as captured is not compared with the plain step again: step, cut, values, batch, seed and machine "
                "are those of a check that passed on %s; recheck=true compares all the same.",
                *(call.method, known.day),
            )
            return
        if self._compare(captured, call, samples).is_compared and control.rank == 0:
            kept.keep()

    def _compare(self, captured: Captured, call: StepRequest, samples: int) -> Checked:
        first = max(slices(self._cuts.planned.layout, self._cuts.sizes(captured.capture, samples)[:1]))
        some = min(samples, max(first, _FEWEST))
        first = first if captured.capture.misfit(some) else some
        if captured.capture.misfit_of_results(first):
            first = samples  # a graph of batches of this size alone says nothing of smaller ones
        return check_captured(
            captured,
            call,
            samples=first,
            control=self._setup.links.control,
            seed=self.seed,
            deadline_s=self._setup.config.deadline_s,
        )
