"""Memory fitting: activation policies for stages that exceed memory, cheapest tensors first.

After Capuchin (Peng et al., ASPLOS 2020) for which tensors, see `recompute_selection` and `offload_budget`, and after
vPipe (Zhao et al., TPDS 2022) for what follows in a pipeline: early stages hold more micro-batches at once, so they
give up more. For every stage with a rank that exceeds its memory, choices are listed once in order, and the shortest
beginning of the list that fits is searched for:

    needed at a moment   bytes above memory <= (micro-batches at rest) x (recomputed bytes)
                                             + (micro-batches on the host) x (offloaded bytes)
    estimate             the shortest beginning that satisfies this at all moments of the judged memory curve
    correction           all stages are judged together; what the judge finds shifts the estimate of each, within the
                         longest beginning known not to fit and the shortest known to fit

Where that is not enough, stages that fit help: by the first, half or all of their choices, one stage after another, as
long as that brings the others nearer. What they do then moves messages and forwards of the others in time. At last,
stages that offload wait sooner for the end of their copies (`planner.evaluation.copies`).

A micro-batch that computes is not counted as at rest: what it dropped is recomputed then. Where nothing else is in
flight it counts all the same, since it is recomputed piece by piece; the judge says how much that helps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.cluster import NO_SWAP
from lightning_pipe.core.plan import Plan
from lightning_pipe.planner.evaluation.copies import tighter
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.evaluation.resolve import places_of
from lightning_pipe.planner.memory.offload_budget import Stay, absences, free_copy_s, stays
from lightning_pipe.planner.memory.recompute_selection import Choice, Terms, choices
from lightning_pipe.planner.problem import MemoryPolicy, Problem

_MOST_JUDGED = 16
_LEAST_JUDGED = 4
_INSTRUCTIONS = 120_000  # that the judge may walk through for one plan, some fifty microseconds each
_MOST_GUESSED = 5  # beginnings of one list that are tried by estimate; then the interval is halved
_HELPED = 0.25  # of its memory, by which a rank may exceed it at most for others to help
_PARTS = (1.0, 0.75, 0.5, 0.25)  # of the longest free copy: longer ones carry more, but are away for less long


def fit_by_policies(problem: Problem, judged: Judged, *, judge: Judge) -> Judged:
    """Choose what the stages that exceed memory recompute and offload, so that every rank fits at little added time.

    Stages that fit are left alone. What an exceeding stage gave up before is chosen again.

    Args:
        problem: memory of the devices, and which policies are wished.
        judged: a plan.
        judge: of the same problem.

    Returns:
        The fastest plan found that fits, or else the one that exceeds memory least.
    """
    if not problem.constraints.memory_policies or not problem.training or judged.overflow(problem.cluster) <= 0:
        return judged
    return _Fitting(problem, judged, judge).best()


class _Fitting:
    """One plan whose stages are to fit."""

    def __init__(self, problem: Problem, judged: Judged, judge: Judge) -> None:
        self._problem, self._judge = problem, judge
        self._works = judge.pricer.works(judged.cuts)
        self._plan = judged.plan
        self._found: dict[tuple[tuple[int, ...], ...], Judged] = {}
        exceeding = {s: excess for s in range(len(self._works)) if (excess := self._excess(judged, s)) > 0}
        self._searches = {s: self._search(judged, s, excess) for s, excess in exceeding.items()}
        self._keeping = judged

    def best(self) -> Judged:
        """Search, and return the best that was judged on the way."""
        allowed = _INSTRUCTIONS // sum(map(len, self._keeping.program.ranks))
        for _ in range(min(_MOST_JUDGED, max(_LEAST_JUDGED, allowed))):
            if not self._try({s: search.next() for s, search in self._searches.items()}):
                break
        self._try({s: search.spared() for s, search in self._searches.items()})
        best = min((self._keeping, *self._found.values()), key=self._rank_of)
        return self._waiting(self._helped(best, left=min(_MOST_JUDGED, allowed)))

    def _waiting(self, best: Judged) -> Judged:
        """Let stages that offload wait for their copies sooner, as long as memory asks for it."""
        for plan in tighter(best.plan):
            if best.overflow(self._problem.cluster) <= 0:
                break
            best = min(best, self._judge.judge(plan), key=self._rank_of)
        return best

    def _helped(self, best: Judged, *, left: int) -> Judged:
        """Let stages that fit give up something too, until all do, nothing helps, or no judgement is left."""
        idle = [s for s in range(len(self._works)) if s not in self._searches]
        while idle and 0 < self._part_over(best) <= _HELPED:
            tried: list[tuple[Judged, int]] = []
            for s in idle:
                search = self._search(best, s, self._excess(best, s))
                counts = dict.fromkeys((1, (len(search.choices) + 1) // 2, len(search.choices)))
                for count in [*counts][: left if search.choices else 0]:
                    stage = self._giving_up(best.plan, s, search.given_up(range(count)))
                    tried.append((self._judge.judge(stage), s))
                    left -= 1
            there, helper = min(tried, key=lambda one: self._rank_of(one[0]), default=(best, -1))
            if self._rank_of(there) >= self._rank_of(best):
                break
            best = there
            idle.remove(helper)
        return best

    def _part_over(self, judged: Judged) -> float:
        """Return by what part of its memory the fullest rank exceeds it."""
        cluster = self._problem.cluster
        return max(self._over(judged, rank) / cluster.device(rank).memory_bytes for rank in range(cluster.ranks))

    def _try(self, asked: Mapping[int, Sequence[int]]) -> bool:
        """Judge chosen numbers of every stage's list and tell the searches; return whether that is new."""
        key = tuple(tuple(chosen) for chosen in asked.values())
        if key in self._found:
            return False
        judged = self._found[key] = self._judge.judge(self._with_policies(asked))
        for s, search in self._searches.items():
            search.learn(asked[s], self._excess(judged, s))
        return True

    def _with_policies(self, asked: Mapping[int, Sequence[int]]) -> Plan:
        plan = self._plan
        for s, numbers in asked.items():
            plan = self._giving_up(plan, s, self._searches[s].given_up(numbers))
        return plan

    def _giving_up(self, plan: Plan, stage: int, given_up: Iterable[Choice]) -> Plan:
        """Return a plan of which one stage gives up these choices, and nothing else."""
        chosen, stages = [*given_up], [*plan.stages]
        recompute, offload = (self._places(stage, chosen, policy) for policy in ("recompute", "offload"))
        stages[stage] = replace(stages[stage], recompute=recompute, offload=offload, beside_copy=None)
        return replace(plan, stages=tuple(stages))

    def _places(self, stage: int, given_up: Iterable[Choice], policy: MemoryPolicy) -> tuple[str, ...]:
        memories = [choice.memory for choice in given_up if choice.policy == policy]
        return places_of(self._problem.graph, self._works[stage], memories)

    def _rank_of(self, judged: Judged) -> tuple[int, int, float]:
        over = [max(0, self._over(judged, rank)) for rank in range(self._problem.cluster.ranks)]
        return max(over), sum(over), judged.step_s

    def _excess(self, judged: Judged, stage: int) -> int:
        return max(self._over(judged, rank) for rank in judged.plan.stages[stage].ranks)

    def _over(self, judged: Judged, rank: int) -> int:
        return judged.peak_bytes[rank] - self._problem.cluster.device(rank).memory_bytes

    def _search(self, judged: Judged, stage: int, excess: int) -> _Search:
        """Return the search of one stage; its fullest rank decides."""
        ranks = judged.program.layout.stages[stage]
        rank = max(ranks, key=lambda r: self._over(judged, r))
        sharing, replica = enumerate(judged.program.sizes), ranks.index(rank)
        samples = max(len(judged.program.layout.samples(stage, replica, m, size)) for m, size in sharing)
        terms, moments = self._terms(judged, stage, rank, samples)
        pricer = self._judge.pricer
        weights = pricer.profile.weights(samples)
        seconds = sum((weight * pricer.seconds[:, i] for i, weight in weights), np.zeros(len(pricer.seconds)))
        seconds = np.maximum(seconds, 0.0) / self._problem.cluster.device(rank).speed
        search = _Search(choices(self._problem.graph, self._works[stage], seconds, terms), moments)
        search.learn((), excess)
        return search

    def _terms(self, judged: Judged, stage: int, rank: int, samples: int) -> tuple[Terms, _Moments]:
        """Return what giving up costs a stage, with as much offloaded for free as makes most room."""
        cluster, ranks = self._problem.cluster, judged.program.layout.stages[stage]
        policies = self._problem.constraints.memory_policies
        link = min((cluster.hosts[cluster.host_of(r)].swap for r in ranks), key=lambda swap: -swap.latency_s)
        if link == NO_SWAP or "offload" not in policies:
            link, policies = NO_SWAP, policies - {"offload"}
        at_rest, memory = stays(judged.timeline, rank), cluster.device(rank).memory_bytes
        longest_s = min(free_copy_s(stays(judged.timeline, r)) for r in ranks) if link != NO_SWAP else 0.0
        most = float(judged.prices.saved_bytes(stage, samples))
        offers = []
        for part in _PARTS:
            copied = min(most, max(0.0, part * longest_s - link.latency_s) * link.bytes_per_s) if longest_s else 0.0
            copy_s = link.seconds(copied) if copied else 0.0
            moments = _Moments.of(judged, rank, at_rest, copy_s, memory=memory)
            offers.append((moments.excess(0.0, 0.0) - moments.excess(0.0, copied), copied, moments))
        room, copied, moments = max(offers, key=lambda offer: offer[0])
        offloaded = room / copied if copied else 0.0
        return Terms(samples, policies, copied, link.bytes_per_s, moments.at_rest(), offloaded), moments


@dataclass(frozen=True)
class _Moments:
    """How full a rank is, and how many of its micro-batches lie at rest, at the moments that matter.

    Attributes:
        over: bytes above its memory (below, if negative).
        remade: micro-batches at rest, at least one.
        offloaded: micro-batches of which what is offloaded is on the host.
    """

    over: NDArray[np.float64]
    remade: NDArray[np.float64]
    offloaded: NDArray[np.float64]

    @classmethod
    def of(cls, judged: Judged, rank: int, at_rest: Sequence[Stay], copy_s: float, *, memory: int) -> _Moments:
        """Return the fullest moment for each pair of counts."""
        curve = judged.curves[rank]
        times, over = np.array(curve.times), np.array(curve.total_bytes, dtype=float) - memory
        away = absences(at_rest, copy_s)
        remade = np.maximum(_count(times, [s.begin for s in at_rest], [s.end for s in at_rest]), 1)
        offloaded = _count(times, [a.begin for a in away], [a.end for a in away])
        fullest: dict[tuple[float, float], float] = {}
        for key, value in zip(zip(remade.tolist(), offloaded.tolist(), strict=True), over.tolist(), strict=True):
            fullest[key] = max(value, fullest.get(key, value))
        counts = np.array([*fullest], dtype=float).reshape(-1, 2)
        return cls(np.array([*fullest.values()]), counts[:, 0], counts[:, 1])

    def at_rest(self) -> float:
        """Return the micro-batches at rest when the rank is fullest."""
        return float(self.remade[self.over.argmax()])

    def excess(self, remade: float, offloaded: float) -> float:
        """Return the bytes above memory once so many are given up per micro-batch."""
        return float((self.over - self.remade * remade - self.offloaded * offloaded).max())


def _count(times: NDArray[np.float64], begins: Sequence[float], ends: Sequence[float]) -> NDArray[np.float64]:
    """Count, at every time, the intervals that it is in; empty ones are in none."""
    spans = [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
    first, last = np.sort([begin for begin, _ in spans]), np.sort([end for _, end in spans])
    found = np.searchsorted(first, times, side="right") - np.searchsorted(last, times, side="right")
    return found.astype(float)


class _Search:
    """The search for the shortest beginning of a stage's choices that fits.

    Args:
        choices: in the order in which they are given up.
        moments: of the rank that decides.

    Attributes:
        choices: the same.
    """

    def __init__(self, choices: list[Choice], moments: _Moments) -> None:
        self.choices, self._moments = choices, moments
        self._excess: dict[int, int] = {}  # number of choices -> bytes above memory that the judge found
        self._shift = 0.0  # what the judge found last, less what was estimated
        self._estimates = [self._estimate(given_up) for given_up in self._beginnings()]

    def given_up(self, numbers: Iterable[int]) -> Iterable[Choice]:
        """Return the choices of these numbers, the later one where a memory is chosen twice."""
        return {self.choices[number].memory: self.choices[number] for number in sorted(numbers)}.values()

    def _beginnings(self) -> Iterator[dict[MemoryPolicy, float]]:
        """Yield the bytes that every beginning gives up."""
        sums: dict[MemoryPolicy, float] = {"recompute": 0.0, "offload": 0.0}
        before: dict[int, Choice] = {}
        yield sums
        for choice in self.choices:
            if choice.memory in before:
                sums["offload"] -= before[choice.memory].bytes
            before[choice.memory] = choice
            sums[choice.policy] += choice.bytes
            yield sums

    def _estimate(self, given_up: Mapping[MemoryPolicy, float]) -> float:
        return self._moments.excess(given_up["recompute"], given_up["offload"])

    def next(self) -> range:
        """Return the beginning to judge next: the best known, once the search is done."""
        fitting = min((count for count, excess in self._excess.items() if excess <= 0), default=None)
        low = max(count for count in self._excess if fitting is None or count < fitting)
        if fitting is None and low == len(self.choices):
            return range(self._nearest())
        high = len(self.choices) if fitting is None else fitting - 1
        if low >= high:
            return range(self._best)
        wanted = (count for count, value in enumerate(self._estimates) if value + self._shift <= 0)
        guess = (low + high + 1) // 2 if len(self._excess) > _MOST_GUESSED else next(wanted, high)
        return range(min(max(guess, low + 1), high))

    def _nearest(self) -> int:
        """Return where to look for the least excess when all choices do not do: giving up too much may take memory."""
        best = self._best
        below = max((count for count in self._excess if count < best), default=best)
        above = min((count for count in self._excess if count > best), default=best)
        return (below + best) // 2 if best - below > above - best else (best + above + 1) // 2

    @property
    def _best(self) -> int:
        """Return the fewest choices that do, or else those that come nearest."""
        return min(self._excess, key=lambda count: (max(0, self._excess[count]), count))

    def spared(self) -> list[int]:
        """Return the best beginning without those recomputed, dearest first, that what is left over allows to keep."""
        best = self._best
        numbers = {choice: number for number, choice in enumerate(self.choices[:best])}
        chosen = [numbers[choice] for choice in self.given_up(range(best))]
        sums: dict[MemoryPolicy, float] = {"recompute": 0.0, "offload": 0.0}
        for number in chosen:
            sums[self.choices[number].policy] += self.choices[number].bytes
        shift = self._excess[best] - self._estimates[best]
        for number in sorted(chosen, reverse=True):
            choice = self.choices[number]
            fewer = {**sums, choice.policy: sums[choice.policy] - choice.bytes}
            if choice.policy == "recompute" and number < best - 1 and self._estimate(fewer) + shift <= 0:
                chosen.remove(number)
                sums = fewer
        return chosen

    def learn(self, chosen: Sequence[int], excess: int) -> None:
        """Take note of what the judge found."""
        count = len(chosen)
        if list(chosen) == list(range(count)):
            self._excess[count] = excess
            self._shift = excess - self._estimates[count]
