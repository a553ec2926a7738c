"""Automatic planner: all planners propose, a local search improves, the simulator decides.

    1  every planner's outlines, data parallel and straight ones are estimated
    2  the best are improved by moves (`planner.candidates.moves`): others on the same devices, then cuts, by estimate
    3  what every planner chooses and the best of all are settled within memory and judged by the simulator
    4  the winner is moved on, its cuts at node granularity, while the judge says better

Where programs are short, 3 and 4 ask bounds before the judge, which cost less and are nearly exact: of all outlines,
then of whole neighbourhoods of the best with each number of replicas per stage (`planner.portfolio.neighborhood`).

So the result is never slower, in simulation, than what any planner chooses (but for choices whose estimates are far
above the best, which are not judged). Work is bounded by counts, not by clocks:
the same problem gives the same plan everywhere. Estimates and judgements become dearer with stages, replicas and
micro-batches, so for large clusters fewer of them are made.

Legend: an outline's value is (bytes over memory, seconds), smaller is better.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_pipe.core.plan import keeps_all
from lightning_pipe.errors import PlanError
from lightning_pipe.planner.candidates.candidate import Candidate, can_meet, never_growing, share_alike
from lightning_pipe.planner.candidates.cut_points import cuttable, nearby, worthwhile
from lightning_pipe.planner.candidates.moves import Ranks, different, groupings, layouts_near
from lightning_pipe.planner.estimates.balance import Balancer
from lightning_pipe.planner.estimates.bound_terms import Parts
from lightning_pipe.planner.estimates.cut_windows import CutWindows
from lightning_pipe.planner.estimates.recurrence import LONG, Estimator, microbatch_counts
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.memory.settle import fitted
from lightning_pipe.planner.portfolio.neighborhood import GROUPED, CandidateSet, Neighborhood, Sieve, shape_of
from lightning_pipe.planner.problem import Problem

Value = tuple[float, float]
Planner = Callable[[Problem], list[Candidate]]

_COARSE = 96  # positions over which layouts are compared
_FINE = 400  # positions over which cuts are moved
_PER_STAGE = 2  # micro-batches per stage at which layouts are compared first
_CLIMBED = 4  # outlines that are improved
_ESTIMATED = 1_500_000  # computes that estimates may walk through, about a microsecond each
_JUDGED = 60_000  # instructions that the judge may walk through, about twenty microseconds each
_REPLICATED_ERROR, _STRAIGHT_ERROR = 0.25, 0.03  # by which estimates may be too long
_SHORT = 500  # instructions and operations up to which bounds cost little
_SWEPT = 2_000  # outlines whose bounds are looked at
_ROUGH = 0.01  # by which loads may be too long: micro-batches of unequal sizes are taken as equal
_PATIENCE = 50  # plans, by rising estimates, that turn out to be worse than the best before the others are left
_CLOSE = 0.1  # by which plans may be slower from which better ones are looked for
_BOUND_COST = 0.1  # of a bound, if judging costs one
_LEAST_JUDGED = 2  # plans that are judged however large they are
_STEPS = (1, 2, 5)  # positions by which a cut is shifted


def auto(problem: Problem, planners: Mapping[str, Planner]) -> list[Judged]:
    """Return the best plans found, the best first.

    Args:
        problem: what is planned.
        planners: who proposes.

    Raises:
        PlanError: what the first planner says, if none proposes anything and nothing else is found.
    """
    answers = [_proposed(planner, problem) for planner in planners.values()]
    by_planner = [answer for answer in answers if not isinstance(answer, PlanError)]
    refused = [answer for answer in answers if isinstance(answer, PlanError)]
    proposed = [outline for outlines in by_planner for outline in outlines]
    search = _Search(problem, [position for outline in proposed for position in outline.cuts])
    search.add(proposed)
    search.improve()
    if not search.is_found:
        raise refused[0]
    return search.judged([outlines[0] for outlines in by_planner if outlines])


def _proposed(planner: Planner, problem: Problem) -> list[Candidate] | PlanError:
    """Return what a planner proposes, or why it has nothing: for so few operations, say."""
    try:
        return planner(problem)
    except PlanError as error:
        return error


class _Search:
    """Candidates with their values, and what may still be spent on more of them."""

    def __init__(self, problem: Problem, positions: Iterable[int]) -> None:
        self._problem = problem
        coarse = worthwhile(problem, sliced=True, most=max(_COARSE, 2 * problem.cluster.ranks))
        fine = {*worthwhile(problem, sliced=True, most=_FINE), *coarse, *positions}
        self._positions = sorted(fine)
        self._windows = CutWindows(problem, self._positions)
        few = Estimator(StageCostTable(problem, coarse)) if len(coarse) < len(fine) else self._windows.fine
        self._balancer = Balancer(few)
        self._values: dict[Candidate, Value] = {}
        self._seen: dict[tuple[tuple[int, ...], Ranks, int], Candidate] = {}
        self._left = _ESTIMATED

    @property
    def is_found(self) -> bool:
        """Return whether there is any outline."""
        return bool(self._values)

    def add(self, outlines: Iterable[Candidate]) -> None:
        """Take outlines of planners, with the depths that they chose and, if they are short, those that seem best."""
        for outline in outlines:
            if len(outline.ranks) * outline.microbatches <= LONG:
                self._estimate(outline.cuts, outline.ranks, outline.microbatches)
            self._values.setdefault(outline, (0.0, self._windows.fine.step_s(outline)))

    def improve(self) -> None:
        """Look for better outlines near the best, while there is something left to spend."""
        ranks = self._problem.cluster.ranks
        if self._problem.constraints.replicas is None:
            whole = [(tuple(range(ranks)),), tuple((rank,) for rank in range(ranks))]
            every = groupings(range(ranks)) if ranks <= GROUPED else whole
            for layout in different(every, self._problem.cluster):
                self._balanced(layout, near=_PER_STAGE * len(layout))
            for start in self._best(_CLIMBED):
                self._climb_layouts(start)
        for start in self._best(_CLIMBED):
            self._climb_cuts(start)

    def _estimate(self, cuts: tuple[int, ...], ranks: Ranks, microbatches: int) -> Candidate:
        key = (cuts, ranks, microbatches)
        if key not in self._seen:
            outline, seconds, excess = self._windows.around(cuts).outline(cuts, ranks, microbatches)
            self._seen[key] = outline
            self._values[outline] = (max(0.0, excess), seconds)
            self._left -= 10 * microbatches * len(ranks)
        return self._seen[key]

    def _best(self, count: int) -> list[Candidate]:
        return heapq.nsmallest(count, self._values, key=self._values.__getitem__)

    def _balanced(self, ranks: Ranks, near: int | None = None) -> Candidate | None:
        """Return the best outline of a layout, its cuts balanced; with few micro-batches more or less than `near`."""
        counts = microbatch_counts(self._problem, stages=len(ranks), replicas=max(map(len, ranks)))
        if near is not None:
            counts = sorted(counts, key=lambda count: abs(count - near))[:3]
        found = [
            self._estimate(cuts, ranks, count) for count in counts for cuts in self._balancer.variants(ranks, count)
        ]
        return min(found, key=self._values.__getitem__, default=None)

    def _climb_layouts(self, start: Candidate) -> None:
        """Change the layout for the better until nothing near is better."""
        here = start
        is_moving = True
        while is_moving and self._left > 0:
            is_moving = False
            for layout in layouts_near(here.ranks, self._problem.cluster):
                there = self._balanced(layout, near=here.microbatches) if self._left > 0 else None
                if there is not None and self._values[there] < self._values[here]:
                    here, is_moving = there, True
                    break

    def _climb_cuts(self, start: Candidate) -> None:
        """Move cuts and change the number of micro-batches for the better until nothing near is better."""
        here = start
        is_moving = True
        while is_moving and self._left > -_ESTIMATED:  # cuts have as much to spend as layouts
            is_moving = False
            for cuts, count in self._near(here):
                there = self._estimate(cuts, here.ranks, count)
                if self._values[there] < self._values[here]:
                    here, is_moving = there, True
                    break

    def _near(self, outline: Candidate) -> Iterator[tuple[tuple[int, ...], int]]:
        stages, replicas = len(outline.ranks), max(map(len, outline.ranks))
        for count in microbatch_counts(self._problem, stages=stages, replicas=replicas):
            yield outline.cuts, count
        for cuts in shifted(outline.cuts, self._positions, steps=_STEPS):
            if can_meet(self._problem, cuts, outline.ranks):
                yield cuts, outline.microbatches

    def judged(self, choices: Sequence[Candidate]) -> list[Judged]:
        """Judge the best outlines, go on from the winner, and return all, the best first.

        Args:
            choices: those of the planners; they are judged too, unless their estimates say that they cannot win.
        """
        judge, budget = Judge(self._problem), _Budget()
        found: dict[Candidate, Judged] = {}
        ranked = self._best(len(self._values))
        excess, seconds = self._values[ranked[0]]
        for outline in choices:
            if self._values[outline] <= (excess, seconds * (1 + _error(outline))):
                found[outline] = fitted(self._problem, outline, judge=judge, best_s=self._best_s(found))
        sieve, is_short = Sieve(self._problem, judge.pricer), self._is_short(ranked[0])
        if is_short:
            self._climb(ranked, found, judge)
        else:
            self._judge_best(ranked, found, judge, budget, sieve)
        best = min(found, key=lambda outline: self._rank(found[outline]))
        if not is_short or not all(map(keeps_all, found[best].plan.stages)):  # bounds know only plans that keep all
            self._refine(best, found, judge, budget, sieve)
        different = {_identity(one): one for one in found.values()}  # lowering depths may have made some equal
        return sorted(different.values(), key=self._rank)

    def _is_short(self, outline: Candidate) -> bool:
        """Return whether bounds are cheap and hold: they ignore activation policies and nearby warm-up depths."""
        constraints = self._problem.constraints
        size = _instructions(outline) + len(self._problem.graph.operations)
        may_free = constraints.memory_policies or constraints.shard_optimizer == "auto"
        is_tight = may_free and any(excess > 0 for excess, _ in self._values.values())
        return size <= _SHORT and constraints.warmup is None and not is_tight

    def _climb(self, ranked: Sequence[Candidate], found: dict[Candidate, Judged], judge: Judge) -> None:
        """Look at all outlines by their bounds, and go on from the best to better ones near them."""
        near = Neighborhood(self._problem, Parts(self._problem, judge.pricer))
        if not found:
            found[ranked[0]] = fitted(self._problem, ranked[0], judge=judge)
        for ring in near.sweep(ranked[:_SWEPT]):
            excess, seconds = min(map(self._rank, found.values()))
            for outline in near.better(ring, (excess, seconds * (1 + _CLOSE)))[:1]:
                found[outline] = found.get(outline) or fitted(
                    self._problem, outline, judge=judge, best_s=self._best_s(found)
                )
                near.left -= _instructions(outline)
        starts: dict[tuple[int, ...], Candidate] = {}
        for outline in sorted(found, key=lambda outline: self._rank(found[outline])):
            starts.setdefault(shape_of(outline.ranks), outline)
        done: set[Candidate] = set()
        for start in starts.values():
            here: Candidate | None = start
            while here is not None and here not in done:
                done.add(here)
                here = self._step(here, near, found, judge)

    def _step(
        self, here: Candidate, near: Neighborhood, found: dict[Candidate, Judged], judge: Judge
    ) -> Candidate | None:
        """Return a better plan nearby; None if no bound is better, or nothing is left for them."""
        for ring in near.rings(here):
            there = self._better(here, ring, near, found, judge)
            if there is not None:
                return there
        return None

    def _better(
        self, here: Candidate, ring: CandidateSet, near: Neighborhood, found: dict[Candidate, Judged], judge: Judge
    ) -> Candidate | None:
        """Return an outline of a ring that is better, if one is."""
        for outline in near.better(ring, self._rank(found[here])):
            if outline not in found:
                found[outline] = fitted(self._problem, outline, judge=judge, best_s=self._best_s(found))
                near.left -= _instructions(outline)
            if self._rank(found[outline]) < self._rank(found[here]):
                return outline
            if near.left <= 0:
                return None
        return None

    def _judge_best(
        self, ranked: Sequence[Candidate], found: dict[Candidate, Judged], judge: Judge, budget: _Budget, sieve: Sieve
    ) -> None:
        """Judge the best outlines by their estimates, but those that estimate or bound say are not the best."""
        best = min(map(self._rank, found.values()), default=(math.inf, math.inf))
        worse = 0  # in a row, by their bounds
        for outline in ranked:
            if outline in found or not self._may_be_best(outline, best):
                continue
            if len(found) >= _LEAST_JUDGED and (worse == _PATIENCE or not budget.allows(outline, share=0.5)):
                return
            if not sieve.may_be_better(outline, best):
                budget.bounded(outline)
                worse += 1
                continue
            budget.spend(outline)
            found[outline] = fitted(self._problem, outline, judge=judge, best_s=self._best_s(found))
            best, worse = min(best, self._rank(found[outline])), 0

    def _may_be_best(self, outline: Candidate, best: Value) -> bool:
        """Return whether an outline may beat the best plan so far, given the error of its estimate."""
        if best[0] > 0:
            return True
        if self._values[outline] > (0.0, best[1] * (1 + _error(outline))):
            return False
        row = self._windows.around(outline.cuts).row(outline.cuts, outline.ranks, outline.microbatches)
        return (outline.microbatches * max(row.loads()) + row.step) * (1 - _ROUGH) < best[1]

    def _refine(
        self, best: Candidate, found: dict[Candidate, Judged], judge: Judge, budget: _Budget, sieve: Sieve
    ) -> None:
        """Move cuts between nodes and depths by one, as the judge says."""
        is_moving = True
        while is_moving:
            is_moving = False
            for outline in self._neighbours(best):
                if outline in found or not can_meet(self._problem, outline.cuts, outline.ranks):
                    continue
                if not budget.allows(outline):
                    return
                if not sieve.may_be_better(outline, self._rank(found[best])):
                    budget.bounded(outline)
                    continue
                budget.spend(outline)
                found[outline] = fitted(self._problem, outline, judge=judge, best_s=self._best_s(found))
                if self._rank(found[outline]) < self._rank(found[best]):
                    best, is_moving = outline, True
                    break

    def _neighbours(self, outline: Candidate) -> Iterator[Candidate]:
        """Yield outlines with one cut, the number of micro-batches, or one depth changed a little."""
        positions = cuttable(self._problem.graph, sliced=not share_alike(self._problem, outline.ranks))
        for cuts in shifted(outline.cuts, positions, steps=(1, 2)):
            yield replace(outline, cuts=cuts)
        stages, replicas = len(outline.ranks), max(map(len, outline.ranks))
        counts = microbatch_counts(self._problem, stages=stages, replicas=replicas)
        for count in sorted(counts, key=lambda count: abs(count - outline.microbatches))[:3]:
            yield self._estimate(outline.cuts, outline.ranks, count)
            yield replace(outline, microbatches=count)
        yield from self._layouts_near(outline)
        constraints = self._problem.constraints
        if constraints.warmup is not None or constraints.schedule == "gpipe":
            return
        for s, change in itertools.product(range(stages), (1, -1)):
            depths = [*outline.depths]
            depths[s] += change
            if 1 <= depths[s] <= outline.microbatches:
                yield replace(outline, depths=never_growing(depths))

    def _layouts_near(self, outline: Candidate) -> Iterator[Candidate]:
        """Yield outlines whose layout differs by one move: with the same cuts where that is possible, and balanced."""
        if self._problem.constraints.replicas is not None:
            return
        for layout in layouts_near(outline.ranks, self._problem.cluster):
            most = microbatch_counts(self._problem, stages=len(layout), replicas=max(map(len, layout)))[-1]
            if len(layout) == len(outline.ranks) and outline.microbatches <= most:
                yield self._estimate(outline.cuts, layout, outline.microbatches)
            balanced = self._balanced(layout, near=outline.microbatches)
            if balanced is not None:
                yield balanced

    def _best_s(self, found: Mapping[Candidate, Judged]) -> float:
        """Return the seconds of the best plan so far that fits; infinite if none does."""
        excess, seconds = min(map(self._rank, found.values()), default=(0.0, math.inf))
        return math.inf if excess > 0 else seconds

    def _rank(self, judged: Judged) -> Value:
        return judged.rank(self._problem.cluster)


def _error(outline: Candidate) -> float:
    """Return by what share of the truth an outline's estimate may be too long."""
    return _REPLICATED_ERROR if max(map(len, outline.ranks)) > 1 else _STRAIGHT_ERROR


def _identity(judged: Judged) -> tuple[object, ...]:
    plan = judged.plan
    return judged.cuts, plan.stages, plan.microbatches, tuple(plan.options.items())


class _Budget:
    """What the judge may still walk through."""

    def __init__(self) -> None:
        self._left = float(_JUDGED)

    def allows(self, outline: Candidate, *, share: float = 1.0) -> bool:
        """Return whether an outline can be judged so that no more than a share of all is spent."""
        return _JUDGED - self._left + _instructions(outline) <= _JUDGED * share

    def spend(self, outline: Candidate) -> None:
        """Take off what judging an outline costs."""
        self._left -= _instructions(outline)

    def bounded(self, outline: Candidate) -> None:
        """Take off what the bounds of an outline cost, that is not judged then."""
        self._left -= _instructions(outline) * _BOUND_COST


def _instructions(outline: Candidate) -> int:
    """Return about how many instructions are judged: computes, messages of both ends, memory; of two equal groups."""
    replicas = [len(group) for group in outline.ranks]
    groups = math.gcd(*replicas)
    return sum(replicas) * min(2, groups) // groups * outline.microbatches * 8


def shifted(cuts: tuple[int, ...], positions: list[int], *, steps: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield cuts of which one is moved by so many positions, either way; they stay rising."""
    for k, cut in enumerate(cuts):
        around = nearby(positions, cut, count=max(steps))
        below, above = [p for p in around if p < cut][::-1], [p for p in around if p > cut]
        for step in steps:
            for side in (below, above):
                moved = (*cuts[:k], side[step - 1], *cuts[k + 1 :]) if step <= len(side) else cuts
                if moved != cuts and all(a < b for a, b in itertools.pairwise(moved)):
                    yield moved
