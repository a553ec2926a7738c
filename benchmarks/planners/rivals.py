"""Planner `auto` against all others on random small problems: beaten, crashed, or a plan that does not fit.

    python -m benchmarks.planners rivals --problems 300

The problems of `benchmarks.planners.exhaustive`, any schedule allowed, with up to ten layers (some in branches) and six
devices of unequal speed; memory from too little to plenty. Where all planners say that nothing fits, so must `auto`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.planners.exhaustive import SAME, Size, random_problem
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.evaluation.evaluate import Judged
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import PLANNERS, propose

SIZE = Size(layers=10, devices=6, skips=0.3)


@dataclass(frozen=True)
class Verdict:
    """One problem, planned by all.

    Attributes:
        seed: which one.
        step_s: seconds of the plan of `auto`; None if it says that none fits.
        ahead: the planners whose plans are better, with their seconds.
        over: the planners that returned a plan over the memory.
        seconds: that `auto` took.
    """

    seed: int
    step_s: float | None
    ahead: dict[str, float]
    over: list[str]
    seconds: float

    @property
    def is_right(self) -> bool:
        """Return whether nobody is better than `auto`, and nobody exceeds memory."""
        return not self.ahead and not self.over


def any_problem(seed: int, size: Size = SIZE) -> Problem:
    """Return a random problem without constraints."""
    return replace(random_problem(seed, size), constraints=Constraints())


def verdict(seed: int, size: Size = SIZE) -> Verdict:
    """Let all planners plan one problem.

    Raises:
        Exception: whatever a planner dies of, but for saying that nothing fits, or that layers are too few.
    """
    problem = any_problem(seed, size)
    start = time.process_time()
    best = _best(problem, "auto")
    seconds = time.process_time() - start
    found = {"auto": best} | {planner: _best(problem, planner) for planner in PLANNERS}
    plans = {planner: one for planner, one in found.items() if one is not None}
    step_s = math.inf if best is None else best.step_s
    ahead = {planner: one.step_s for planner, one in plans.items() if one.step_s < step_s * (1 - SAME)}
    over = [planner for planner, one in plans.items() if one.overflow(problem.cluster) > 0]
    return Verdict(seed, None if best is None else step_s, ahead, over, seconds)


def _best(problem: Problem, planner: str) -> Judged | None:
    try:
        return propose(problem, planner)[0]
    except PlanError:
        return None


def main(arguments: Sequence[str] = ()) -> None:
    """Print every problem that is not right, and a summary."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planners rivals")
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args(arguments)
    found = []
    for seed in range(asked.first, asked.first + asked.problems):
        found.append(verdict(seed))
        if not found[-1].is_right:
            print(found[-1], flush=True)
    planned = [one for one in found if one.step_s is not None]
    times = sorted(one.seconds for one in found)
    ahead, over = sum(bool(one.ahead) for one in found), sum(bool(one.over) for one in found)
    print(
        f"{len(found)} problems, {len(planned)} with a plan; {ahead} in which a planner is ahead of auto, {over} over "
        f"memory. auto took {statistics.median(times):.2f} s (median), {times[-1]:.2f} s (longest)."
    )
