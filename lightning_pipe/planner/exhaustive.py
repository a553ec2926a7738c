"""What is the best plan of all? Every cut, every grouping of the devices, every number of micro-batches, every warm-up.

The truth for small problems, by the simulator. Outlines are looked at in the order of a bound on their time, from their
computes alone:

    step >= max over stages s of  (first micro-batch forward through the stages before s) + n (F_s + B_s)

and once the bound exceeds the best plan found, all that follow do. (F and B at the exact share of samples; the largest
real share is no less.) O(2^nodes x groupings), so refused above a number of outlines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lightning_pipe.errors import PlanError
from lightning_pipe.planner.cuts import cuttable
from lightning_pipe.planner.estimate import Estimator, Row, microbatch_counts
from lightning_pipe.planner.judge import Judge, Judged
from lightning_pipe.planner.moves import Ranks, groupings
from lightning_pipe.planner.outline import Outline
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.segments import Segments

MOST_OUTLINES = 200_000
_ROUNDING = 1e-9


def exhaustive(problem: Problem) -> list[Judged]:
    """Return the best plan of all that fit into memory, or the one that misses it by least.

    Raises:
        PlanError: if there are too many plans to try them all.
    """
    judge = Judge(problem)
    estimator = Estimator(Segments(problem, cuttable(problem.graph, sliced=True)))
    bounded = sorted(_outlines(problem, estimator), key=lambda one: one[0])
    best: Judged | None = None
    for bound, (cuts, ranks, count), row in bounded:
        if best is not None and bound > best.step_s * (1 + _ROUNDING) and best.overflow(problem.cluster) <= 0:
            break
        most = [count] * len(ranks)
        for depths in _lowered(estimator.depth_choices(row, most=most, microbatches=count)):
            judged = judge.judge(Outline(cuts, ranks, count, depths).plan(problem))
            if best is None or _rank(judged, problem) < _rank(best, problem):
                best = judged
    assert best is not None, "one stage on all ranks is always possible"
    return [best]


def _rank(judged: Judged, problem: Problem) -> tuple[int, float]:
    return max(0, judged.overflow(problem.cluster)), judged.step_s


def _lowered(choices: Iterator[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the depths, and what memory may force them down to."""
    found = [*choices]
    least = tuple(tuple(min(depth, most) for depth in depths) for depths in found for most in range(1, max(depths)))
    return list(dict.fromkeys((*found, *least)))


def _outlines(
    problem: Problem, estimator: Estimator
) -> Iterator[tuple[float, tuple[tuple[int, ...], Ranks, int], Row]]:
    """Yield a bound on the time, cuts, ranks and micro-batches, and the row of every outline."""
    positions = [int(position) for position in estimator.segments.bounds[1:-1]]
    layouts = _layouts(problem)
    tried = 0
    for ranks in layouts:
        counts = microbatch_counts(problem, stages=len(ranks), replicas=max(map(len, ranks)))
        for cuts in itertools.combinations(positions, len(ranks) - 1):
            tried += len(counts)
            if tried > MOST_OUTLINES:
                raise PlanError(
                    f"planner='exhaustive' would try over {MOST_OUTLINES} plans: {len(positions) + 1} operations on "
                    f"{problem.cluster.ranks} devices. Use planner='auto', or a smaller model and fewer devices."
                )
            for count in counts:
                row = estimator.row(cuts, ranks, count)
                yield _bound(row, count), (cuts, ranks, count), row


def _layouts(problem: Problem) -> list[Ranks]:
    wished = problem.wishes.replicas
    found = groupings(range(problem.cluster.ranks))
    return [ranks for ranks in found if wished is None or tuple(map(len, ranks)) == wished]


def _bound(row: Row, microbatches: int) -> float:
    before = itertools.accumulate(row.forward, initial=0.0)
    return max(first + microbatches * load for first, load in zip(before, row.loads(), strict=False)) + row.step
