"""What is the best plan of all? Every cut, every grouping of the devices, every number of micro-batches, every warm-up.

The truth for small problems, by the simulator. Most outlines are never judged, as two numbers say that they lose:

    bound      of an estimate: head of the pipeline + what one stage or link must do for all micro-batches + tail
    estimate   `planner.estimate`; whatever it puts `margin` above the best judged plan is left out

The usual policies of warm-up are tried first, then all depths of those rows that could still be better.
O(2^nodes x groupings), so refused above a number of outlines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TypeAlias

from lightning_pipe.errors import PlanError
from lightning_pipe.planner.cuts import cuttable
from lightning_pipe.planner.estimate import Estimator, Row, microbatch_counts, row_s
from lightning_pipe.planner.judge import Judge, Judged
from lightning_pipe.planner.moves import Ranks, groupings
from lightning_pipe.planner.outline import Outline
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.segments import Segments

MOST_OUTLINES = 200_000
MARGIN = 0.25  # by which estimates of replicated stages may be too long
FEW_SAMPLES = 16  # of a batch, for which all numbers of micro-batches are tried
CLOSE = 0.02  # by which those of other stages are
DEEP = 0.1  # by which estimates of replicated stages may be too long where only depths differ from what was judged
Bounded: TypeAlias = tuple[float, Row, tuple[tuple[int, ...], Ranks, int]]


def exhaustive(problem: Problem, *, margin: float = MARGIN) -> list[Judged]:
    """Return the best plan of all that fit into memory, or the one that misses it by least.

    Args:
        problem: what is planned.
        margin: share by which estimates may be too long.

    Raises:
        PlanError: if there are too many plans to try them all.
    """
    judge = Judge(problem)
    estimator = Estimator(Segments(problem, cuttable(problem.graph, sliced=True)))
    rows = sorted(_rows(problem, estimator), key=lambda one: one[0])
    best: Judged | None = None
    for slack in (margin, math.inf):  # what estimates say to fit may not; then all others are looked at
        for seconds, outline in _outlines(problem, estimator, rows, slack):
            if best is not None and _fits(best, problem) and seconds > best.step_s * (1 + margin):
                break
            judged = judge.judge(outline.plan(problem))
            if best is None or judged.rank(problem.cluster) < best.rank(problem.cluster):
                best = judged
        if best is not None and _fits(best, problem):
            break
    assert best is not None, "one stage on all ranks is always possible"
    return [_deepened(problem, best, estimator, rows, judge)]


def _deepened(problem: Problem, best: Judged, estimator: Estimator, rows: list[Bounded], judge: Judge) -> Judged:
    """Return the best of all depths, where the bound allows one that is better."""
    if not _fits(best, problem) or problem.wishes.warmup is not None or problem.wishes.schedule == "gpipe":
        return best
    for bound, row, (cuts, ranks, count) in rows:
        if bound > best.step_s * (1 + DEEP):
            break
        slack = DEEP if len(ranks) < problem.cluster.ranks else CLOSE
        for depths in _all_depths(len(ranks), count):
            if row_s(row, depths=depths, microbatches=count) > best.step_s * (1 + slack):
                continue
            judged = judge.judge(Outline(cuts, ranks, count, depths).plan(problem))
            if judged.rank(problem.cluster) < best.rank(problem.cluster):
                best = judged
    return best


def _all_depths(stages: int, microbatches: int) -> Iterator[tuple[int, ...]]:
    """Yield all depths that never grow, up to some more than hide messages as long as a compute."""
    most = [min(microbatches, 2 * (stages - s) + 4) for s in range(stages)]
    for depths in itertools.product(*(range(1, m + 1) for m in most)):
        if all(a >= b for a, b in itertools.pairwise(depths)):
            yield depths


def _fits(judged: Judged, problem: Problem) -> bool:
    return judged.overflow(problem.cluster) <= 0


def _outlines(
    problem: Problem, estimator: Estimator, rows: list[Bounded], margin: float
) -> list[tuple[float, Outline]]:
    """Return the outlines that the bound allows by estimated seconds; of those that cannot fit, one for each layout."""
    found: list[tuple[float, Outline]] = []
    least = math.inf
    hopeless: set[Ranks] = set()
    for bound, row, (cuts, ranks, count) in rows:
        if bound > least * (1 + margin):
            break
        rooms = estimator.rooms(cuts, ranks, count)
        if any(room.saved > room.spare for room in rooms) and not problem.wishes.reliefs:
            if ranks in hopeless:
                continue
            hopeless.add(ranks)
        for depths in _lowered(estimator.depth_choices(row, most=[count] * len(ranks), microbatches=count)):
            seconds = row_s(row, depths=depths, microbatches=count)
            found.append((seconds, Outline(cuts, ranks, count, depths)))
            if all(depth * room.saved <= room.bytes for depth, room in zip(depths, rooms, strict=True)):
                least = min(least, seconds)
    return sorted(found, key=lambda one: one[0])


def _lowered(choices: Iterator[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the depths, and what memory may force them down to."""
    found = [*choices]
    least = [tuple(min(depth, most) for depth in depths) for depths in found for most in range(1, max(depths))]
    return list(dict.fromkeys((*found, *least)))


def _rows(problem: Problem, estimator: Estimator) -> Iterator[tuple[float, Row, tuple[tuple[int, ...], Ranks, int]]]:
    """Yield a bound on the time, the row, and cuts, ranks and micro-batches of every outline."""
    positions = [int(position) for position in estimator.segments.bounds[1:-1]]
    asked = [(ranks, _counts(problem, stages=len(ranks), replicas=max(map(len, ranks)))) for ranks in _layouts(problem)]
    tried = sum(len(counts) * math.comb(len(positions), len(ranks) - 1) for ranks, counts in asked)
    if tried > MOST_OUTLINES:
        raise PlanError(
            f"planner='exhaustive' would try {tried} plans, and tries {MOST_OUTLINES} at most: {len(positions) + 1} "
            f"operations on {problem.cluster.ranks} devices. Use planner='auto', or a smaller model and fewer devices."
        )
    for ranks, counts in asked:
        for cuts in itertools.combinations(positions, len(ranks) - 1):
            for count in counts:
                row = estimator.row(cuts, ranks, count)
                yield _bound(row, count), row, (cuts, ranks, count)


def _counts(problem: Problem, *, stages: int, replicas: int) -> list[int]:
    """Return all numbers of micro-batches, where samples are few."""
    found = microbatch_counts(problem, stages=stages, replicas=replicas)
    few = problem.wishes.microbatches is None and problem.samples <= FEW_SAMPLES
    return list(range(1, found[-1] + 1)) if few else found


def _layouts(problem: Problem) -> list[Ranks]:
    wished = problem.wishes.replicas
    found = groupings(range(problem.cluster.ranks))
    return [ranks for ranks in found if wished is None or tuple(map(len, ranks)) == wished]


def _bound(row: Row, microbatches: int) -> float:
    """Return what no order of this row can be quicker than: one stage or link is busy all the time."""
    heads = [0.0, *itertools.accumulate(f + a for f, a in zip(row.forward, (*row.ahead, 0.0), strict=True))]
    waits = [b - late for b, late in zip(row.backward, row.late, strict=True)]
    tails = [0.0, *itertools.accumulate(w + back for w, back in zip(waits, (*row.back, 0.0), strict=True))]
    stages = (
        heads[s] + microbatches * load + max(row.finish[s], tails[s] - row.late[s] + row.late[0] + row.finish[0])
        for s, load in enumerate(row.loads())
    )
    links = (
        heads[s] + row.forward[s] + microbatches * ahead + row.forward[s + 1] + waits[s + 1] + back + tails[s]
        for s, (ahead, back) in enumerate(zip(row.ahead, row.back, strict=True))
    )
    return max(*stages, *links, 0.0) + row.step
