"""Plans of pipelines that are never flushed: what counts is the busiest rank, not how long a batch takes to pass.

    1  every planner's outlines; and balanced cuts of each of their layouts, of the layout that is asked for, or of all
       (width, depth): as many replicas of every stage as divide the ranks
    2  by the seconds for which their busiest rank computes and steps, which no round is shorter than
    3  judged in this order, with memory of versions and forwards in flight, until no other can be quicker
    4  the best is moved on: cuts by one or two places, and the number of micro-batches

The dynamic programme over the slowest stage is PipeDream's (`planner.systems.pipedream`; SOSP 2019, section 3.1), the
search over width, depth and micro-batches that of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training"
(ICML 2021), section 4, whose stages are equal where ours are balanced by their seconds.

Work is bounded by counts. Legend: an outline's value is the seconds of its busiest rank.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from lightning_pipe.errors import PlanError
from lightning_pipe.planner.candidates.candidate import Candidate, can_meet, share_alike
from lightning_pipe.planner.candidates.cut_points import cuttable, worthwhile
from lightning_pipe.planner.candidates.moves import Ranks
from lightning_pipe.planner.estimates.balance import Balancer
from lightning_pipe.planner.estimates.recurrence import Estimator, microbatch_counts
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.memory.settle import fitted
from lightning_pipe.planner.portfolio.auto import Planner, shifted
from lightning_pipe.planner.problem import Problem

log = logging.getLogger(__name__)

_WALKED = 300_000  # instructions that the judge may walk through, about twenty microseconds each
_LEAST_JUDGED = 2  # outlines that are judged however large they are
_ROUNDS = 8  # that are simulated of each
_MUCH = 0.8  # of the seconds of the best plan


def round_plans(problem: Problem, planners: Mapping[str, Planner], *, searches: bool) -> list[Judged]:
    """Return plans that can run in rounds, the best first.

    Args:
        problem: what is planned, with a policy of weight versions.
        planners: who proposes.
        searches: whether anything else than their outlines is looked at.

    Raises:
        PlanError: if there is none, as with a single device.
    """
    outlines, refused = list[Candidate](), list[PlanError]()
    for planner in planners.values():
        try:
            outlines += planner(problem)
        except PlanError as error:
            refused.append(error)
    search = _RoundSearch(problem, refused)
    pipelines = [outline for outline in outlines if len(outline.ranks) > 1]
    if searches:
        layouts = dict.fromkeys([*_layouts(problem), *(outline.ranks for outline in pipelines)])
        pipelines += search.balanced(layouts)
    search.judge_best(dict.fromkeys(pipelines))
    if searches:
        search.improve()
    if not search.judged and refused:
        raise refused[0]
    if not search.judged:
        raise PlanError(
            f"versions={problem.constraints.versions!r} asks for a pipeline of at least two stages, but the layout, or "
            f"{', '.join(planners)}, leaves nothing but data parallel training, in which nothing waits for the next "
            "batch. Set a layout such as layout='1-1', or planner='auto', or versions='sync'."
        )
    search.warn_of_refused()
    return sorted(search.judged.values(), key=lambda judged: judged.rank(problem.cluster))


def _layouts(problem: Problem) -> Iterator[Ranks]:
    """Yield the layout that is asked for, or else every width by every depth."""
    count, wished = problem.cluster.ranks, problem.constraints.replicas
    widths = [wished] if wished else [(w,) * (count // w) for w in range(1, count // 2 + 1) if count % w == 0]
    for replicas in widths:
        firsts = itertools.accumulate(replicas, initial=0)
        if len(replicas) > 1:
            yield tuple(tuple(range(first, first + n)) for first, n in zip(firsts, replicas, strict=False))


class _RoundSearch:
    """Outlines of rounds with what the judge says of them.

    Args:
        problem: what is planned.
        refused: takes why outlines cannot run in rounds.
    """

    def __init__(self, problem: Problem, refused: list[PlanError]) -> None:
        self.judged: dict[Candidate, Judged] = {}
        self._problem, self._judge, self._refused = problem, Judge(problem), refused
        self._left = float(_WALKED)
        self._quickest_s = float("inf")  # of what cannot run in rounds, at best

    def balanced(self, layouts: Iterable[Ranks]) -> Iterator[Candidate]:
        """Yield outlines of layouts whose stages are about equally long."""
        problem = self._problem
        positions = worthwhile(problem, sliced=True, most=max(100, 2 * problem.cluster.ranks))
        balancer = Balancer(Estimator(StageCostTable(problem, positions)))
        for ranks in layouts:
            for count in microbatch_counts(problem, stages=len(ranks), replicas=max(map(len, ranks))):
                for cuts in balancer.variants(ranks, count):
                    yield Candidate(cuts, ranks, count, tuple(range(len(ranks), 0, -1)))

    def judge_best(self, outlines: Iterable[Candidate]) -> None:
        """Judge outlines by rising values, until none that is left can be quicker than one that fits."""
        valued = [(self._value(outline), number, outline) for number, outline in enumerate(outlines)]
        for value, _, outline in sorted(valued):
            if len(self.judged) >= _LEAST_JUDGED and (value >= self._best_s() or self._left <= 0):
                return
            self._add(outline)

    def improve(self) -> None:
        """Go on from the best plan to better ones near it."""
        is_moving = bool(self.judged)
        while is_moving and self._left > 0:
            here, is_moving = min(self.judged, key=self._rank), False
            for outline in self._near(here):
                if outline in self.judged or self._left <= 0 or self._value(outline) >= self._best_s():
                    continue
                self._add(outline)
                if outline in self.judged and self._rank(outline) < self._rank(here):
                    is_moving = True
                    break

    def _near(self, outline: Candidate) -> Iterator[Candidate]:
        problem, ranks = self._problem, outline.ranks
        positions = cuttable(problem.graph, sliced=not share_alike(problem, ranks))
        for cuts in shifted(outline.cuts, positions, steps=(1, 2)):
            if can_meet(problem, cuts, ranks):
                yield replace(outline, cuts=cuts)
        for count in microbatch_counts(problem, stages=len(ranks), replicas=max(map(len, ranks))):
            yield replace(outline, microbatches=count)

    def _add(self, outline: Candidate) -> None:
        """Judge an outline, fitted to memory; what cannot run in rounds is left out."""
        self._left -= sum(map(len, outline.ranks)) * outline.microbatches * 8 * _ROUNDS
        try:
            self.judged[outline] = fitted(self._problem, outline, judge=self._judge, best_s=self._best_s())
        except PlanError as error:
            self._refused.append(error)
            self._quickest_s = min(self._quickest_s, self._value(outline))

    def warn_of_refused(self) -> None:
        """Say why plans were left out that may be much quicker than the best."""
        if self._quickest_s < _MUCH * self._best_s():
            log.warning("Plans that may be quicker were left out: %s", self._refused[-1])

    def _value(self, outline: Candidate) -> float:
        return self._judge.busiest_s(outline.plan(self._problem))

    def _best_s(self) -> float:
        cluster = self._problem.cluster
        fitting = (judged.step_s for judged in self.judged.values() if judged.overflow(cluster) <= 0)
        return min(fitting, default=float("inf"))

    def _rank(self, outline: Candidate) -> tuple[float, float]:
        return self.judged[outline].rank(self._problem.cluster)
