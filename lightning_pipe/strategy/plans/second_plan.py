"""Second plan: where the first steps took otherwise than predicted, another one is made by what they took.

    first steps     recorded beside their prediction
    within OFF      the plan stays
    otherwise       costs are calibrated to what was recorded, and planned with once more
    by GAIN better  the other plan is taken, if the steps that are left are worth the change
    its first steps recorded too; if they take longer than those of the first plan, that is taken again

Ranks of the first stage load the data. One that has loaded none so far cannot begin in the middle of an epoch, so the
first stage of another plan is on ranks of the first stage now.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pipe.config import DappleConfig
from lightning_pipe.core.plan import Plan
from lightning_pipe.errors import PlanError
from lightning_pipe.lightning_names import rank_zero_info
from lightning_pipe.planner.comparison.calibration import calibrated
from lightning_pipe.planner.evaluation.evaluate import Judged, judge
from lightning_pipe.planner.problem import Problem
from lightning_pipe.report import Comparison
from lightning_pipe.strategy.plans.planning import Planned, propose
from lightning_pipe.units import format_seconds, format_share

log = logging.getLogger(__name__)

OFF = 0.15  # of the predicted seconds of a step: prediction and measurement differ by more
GAIN = 0.1  # of the seconds of a step that another plan takes less
_EXPLAINED = 0.1  # of the measured seconds of a step: so far calibrated costs may be from them
_WORTH = 2.0  # times what the change takes is gained in the steps that are left


class SecondPlan:
    """Choose on rank 0, after the first steps by a plan, by which plan the next ones run.

    Attributes:
        is_settled: whether nothing is to be chosen any more.
    """

    def __init__(self) -> None:
        self.is_settled = False
        self._first: tuple[Planned, float] | None = None  # with the seconds of a step, if another plan was taken

    def choice(
        self,
        planned: Planned,
        comparison: Comparison | None,
        *,
        loading: Sequence[int],
        steps: float,
        change_s: float,
    ) -> Planned | None:
        """Return another plan than the present one, if the next steps are to run by it; say why, or why not.

        Args:
            planned: the present plan.
            comparison: of its first steps; None if nothing was predicted that could be compared.
            loading: ranks that load batches.
            steps: that are left.
            change_s: seconds that taking another plan may need.
        """
        if comparison is None:
            return None
        measured_s = comparison.step.measured
        if self._first is not None:
            first, first_s = self._first
            self.is_settled = True
            is_slower = measured_s > first_s
            rank_zero_info(
                f"Measured: the second plan takes {format_seconds(measured_s)} per step, the first took "
                f"{format_seconds(first_s)}{', and is used again' * is_slower}."
            )
            return first if is_slower else None
        if abs(comparison.step.ratio - 1) <= OFF:
            return None
        again = _planned_again(planned, comparison)
        if again is None:
            return None
        sentence, other = again.verdict(loading=loading, steps=steps, change_s=change_s)
        predicted_s = comparison.step.predicted
        rank_zero_info(
            f"Measured: {format_seconds(measured_s)} per step; predicted: {format_seconds(predicted_s)}. "
            f"Replanned with the measured times: {sentence}"
        )
        if other is None:
            return None
        self._first = planned, measured_s
        judged = (other, *(one for one in again.found if one is not other))
        return replace(planned, plan=other.plan, cuts=other.cuts, problem=again.problem, judged=judged)


@dataclass(frozen=True)
class _Again:
    """What planning again has found.

    Attributes:
        problem: with the costs that were measured.
        present: the present plan, judged by them.
        found: plans, the best first.
    """

    problem: Problem
    present: Judged
    found: tuple[Judged, ...]

    def verdict(self, *, loading: Sequence[int], steps: float, change_s: float) -> tuple[str, Judged | None]:
        """Return what is to be said, and the plan that is to be taken; arguments as of `SecondPlan.choice`."""
        present_s, plan = self.present.step_s, self.present.plan
        better = [one for one in self.found if one.plan != plan and one.step_s < (1 - GAIN) * present_s]
        if not better:
            return "the plan is still the best.", None
        possible = [one for one in better if {*one.plan.layout.stages[0]} <= {*loading}]
        best = (possible or better)[0]
        gain_s = present_s - best.step_s
        share = format_share(gain_s / present_s, 0)
        if not possible:
            return (
                f"{_options(best.plan)} is predicted to take {share} less, but cannot be taken now: its first stage is "
                "on ranks that load no batches. Start with these options instead."
            ), None
        if steps * gain_s < _WORTH * change_s:
            return f"another plan is predicted to take {share} less, too little for the remaining steps.", None
        return (
            f"another plan is predicted to take {share} less, and is used from now on (replan=false keeps the first).",
            best,
        )


def _planned_again(planned: Planned, comparison: Comparison) -> _Again | None:
    """Plan by what was measured; None if that does not explain the step, or no plan fits then."""
    problem = calibrated(planned.problem, planned.judged[0], comparison)
    present, measured_s = judge(planned.judged[0].plan, problem), comparison.step.measured
    if abs(present.step_s / measured_s - 1) > _EXPLAINED:
        log.info(
            "What was measured of computes, messages and sums explains %s of the %s that a step takes, so nothing is "
            "planned with it.",
            *(format_seconds(present.step_s), format_seconds(measured_s)),
        )
        return None
    try:
        found = propose(problem, _wanted(planned), given=None, may_offload=planned.may_offload)
    except PlanError as error:
        log.info("With what was measured there is no other plan: %s", error)
        return None
    return _Again(problem, present, tuple(found))


def _options(plan: Plan) -> str:
    """Return the options with which a planner makes plans of this form."""
    groups = dict.fromkeys(plan.layout.stages)
    options = {"layout": "-".join(str(len(ranks)) for ranks in groups), "microbatches": plan.microbatches}
    if len(groups) < len(plan.stages):
        options["stages_per_device"] = len(plan.stages) // len(groups)
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _wanted(planned: Planned) -> DappleConfig:
    """Return the options that another plan keeps to; its micro-batches too, where these change what is trained."""
    if not planned.problem.graph.coupled:
        return planned.wanted
    return replace(planned.wanted, microbatches=planned.plan.microbatches)


def steps_left(total: float, done: int) -> float:
    """Return how many optimizer steps are left.

    Args:
        total: of the fit, as Lightning says it: -1 or infinite if it is not known.
        done: steps that were made.
    """
    return math.inf if total < 0 else max(0.0, total - done)
