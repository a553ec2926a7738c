"""What should stages that exceed memory not keep? As little as makes them fit, in the order of what it costs.

After Capuchin (Peng et al., ASPLOS 2020) for which tensors, see `planner.remaking` and `planner.swapping`, and after
vPipe (Zhao et al., TPDS 2022) for what follows in a pipeline: early stages hold more micro-batches at once, so they
give up more. For every stage with a rank that exceeds its memory, choices are listed once in order, and the shortest
beginning of the list that fits is searched for:

    needed at a moment   bytes above memory <= (micro-batches at rest) x (recomputed bytes)
                                             + (micro-batches on the host) x (offloaded bytes)
    estimate             the shortest beginning that satisfies this at all moments of the judged memory curve
    correction           all stages are judged together; what the judge finds shifts the estimate of each, within the
                         longest beginning known not to fit and the shortest known to fit

A micro-batch that computes is not counted as at rest: what it dropped is made anew then. Where nothing else is in
flight it counts all the same, since it is made anew piece by piece; the judge says how much that helps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.cluster import NO_SWAP
from lightning_pipe.core.plan import Plan
from lightning_pipe.cost.stage import StageWork
from lightning_pipe.planner.judge import Judge, Judged
from lightning_pipe.planner.problem import Problem, Relief
from lightning_pipe.planner.remaking import Choice, Terms, choices
from lightning_pipe.planner.resolve import places_of
from lightning_pipe.planner.swapping import Stay, absences, free_copy_s, stays

_MOST_JUDGED = 16
_PARTS = (1.0, 0.75, 0.5, 0.25)  # of the longest free copy: longer ones carry more, but are away for less long


def relieve(problem: Problem, judged: Judged, *, judge: Judge) -> Judged:
    """Choose what the stages that exceed memory recompute and offload, so that every rank fits at little added time.

    Stages that fit are left alone. What an exceeding stage gave up before is chosen anew.

    Args:
        problem: memory of the devices, and which reliefs are wished.
        judged: a plan.
        judge: of the same problem.

    Returns:
        The fastest plan found that fits, or else the one that exceeds memory least.
    """
    if not problem.wishes.reliefs or not problem.training or judged.overflow(problem.cluster) <= 0:
        return judged
    return _Relieving(problem, judged, judge).best()


class _Relieving:
    """One plan under relief."""

    def __init__(self, problem: Problem, judged: Judged, judge: Judge) -> None:
        self._problem, self._judge = problem, judge
        self._works = judge.pricer.works(judged.cuts)
        self._plan = judged.plan
        self._found: dict[tuple[tuple[int, ...], ...], Judged] = {}
        exceeding = {s: excess for s in range(len(self._works)) if (excess := self._excess(judged, s)) > 0}
        self._searches = {s: self._search(judged, s, excess) for s, excess in exceeding.items()}
        self._unrelieved = judged

    def best(self) -> Judged:
        """Search, and return the best that was judged on the way."""
        for _ in range(_MOST_JUDGED):
            if not self._try({s: search.next() for s, search in self._searches.items()}):
                break
        self._try({s: search.spared() for s, search in self._searches.items()})
        return min((self._unrelieved, *self._found.values()), key=self._rank_of)

    def _try(self, asked: Mapping[int, Sequence[int]]) -> bool:
        """Judge chosen numbers of every stage's list and tell the searches; return whether that is new."""
        key = tuple(tuple(chosen) for chosen in asked.values())
        if key in self._found:
            return False
        judged = self._found[key] = self._judge.judge(self._relieved(asked))
        for s, search in self._searches.items():
            search.learn(asked[s], self._excess(judged, s))
        return True

    def _relieved(self, asked: Mapping[int, Sequence[int]]) -> Plan:
        stages = list(self._plan.stages)
        for s, numbers in asked.items():
            given_up: dict[Relief, list[int]] = defaultdict(list)
            for number in numbers:
                choice = self._searches[s].choices[number]
                given_up[choice.relief].append(choice.memory)
            places = {relief: self._places(self._works[s], memories) for relief, memories in given_up.items()}
            stages[s] = replace(stages[s], recompute=places.get("recompute", ()), offload=places.get("offload", ()))
        return replace(self._plan, stages=tuple(stages))

    def _places(self, work: StageWork, memories: Sequence[int]) -> tuple[str, ...]:
        return places_of(self._problem.graph, work, memories)

    def _rank_of(self, judged: Judged) -> tuple[int, float, int]:
        given_up = sum(len(stage.recompute) + len(stage.offload) for stage in judged.plan.stages)
        return max(0, judged.overflow(self._problem.cluster)), judged.step_s, given_up

    def _excess(self, judged: Judged, stage: int) -> int:
        return max(self._over(judged, rank) for rank in judged.plan.stages[stage].ranks)

    def _over(self, judged: Judged, rank: int) -> int:
        return judged.peak_bytes[rank] - self._problem.cluster.device(rank).memory_bytes

    def _search(self, judged: Judged, stage: int, excess: int) -> _Search:
        """Return the search of one stage; its fullest rank decides."""
        rank = max(judged.plan.stages[stage].ranks, key=lambda r: self._over(judged, r))
        sharing = enumerate(judged.program.sizes)
        replica = judged.plan.stages[stage].ranks.index(rank)
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
        cluster, ranks = self._problem.cluster, judged.plan.stages[stage].ranks
        reliefs = self._problem.wishes.reliefs
        link = min((cluster.hosts[cluster.host_of(r)].swap for r in ranks), key=lambda swap: -swap.latency_s)
        if link == NO_SWAP or "offload" not in reliefs:
            link, reliefs = NO_SWAP, reliefs - {"offload"}
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
        return Terms(samples, reliefs, copied, link.bytes_per_s, moments.at_rest(), offloaded), moments


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


@dataclass
class _Search:
    """The search for the shortest beginning of a stage's choices that fits.

    Attributes:
        choices: in the order in which they are given up.
        moments: of the rank that decides.
        excess: what the judge found, by the number of choices: bytes above memory.
        shift: what the judge found last, less what was estimated.
    """

    choices: list[Choice]
    moments: _Moments
    excess: dict[int, int] = field(default_factory=dict)
    shift: float = 0.0

    def __post_init__(self) -> None:
        self._estimates = [self._estimate(range(count)) for count in range(len(self.choices) + 1)]

    def _estimate(self, numbers: Sequence[int]) -> float:
        sums: dict[Relief, float] = defaultdict(float)
        for number in numbers:
            sums[self.choices[number].relief] += self.choices[number].bytes
        return self.moments.excess(sums["recompute"], sums["offload"])

    @property
    def _low(self) -> int:
        """Return the most choices known not to do."""
        fitting = self._fitting
        return max(
            count for count, excess in self.excess.items() if excess > 0 and (fitting is None or count < fitting)
        )

    @property
    def _fitting(self) -> int | None:
        """Return the fewest choices known to do."""
        return min((count for count, excess in self.excess.items() if excess <= 0), default=None)

    @property
    def _best(self) -> int:
        """Return the fewest choices that do, or else those that come nearest."""
        return min(self.excess, key=lambda count: (max(0, self.excess[count]), count))

    @property
    def _is_done(self) -> bool:
        """Say whether the shortest beginning that fits is known, or that all choices do not do."""
        return self._low + 1 == (len(self.choices) + 1 if self._fitting is None else self._fitting)

    def next(self) -> range:
        """Return the beginning to judge next: what is known to be best, once the search is done."""
        if self._is_done:
            return range(self._best)
        high = len(self.choices) if self._fitting is None else self._fitting - 1
        wanted = (count for count, value in enumerate(self._estimates) if value + self.shift <= 0)
        return range(min(max(next(wanted, high), self._low + 1), high))

    def spared(self) -> list[int]:
        """Return the best beginning without those recomputed, dearest first, that what is left over allows to keep."""
        best = self._best
        chosen, shift = list(range(best)), self.excess[best] - self._estimates[best]
        for number in reversed(range(max(0, best - 1))):
            fewer = [other for other in chosen if other != number]
            if self.choices[number].relief == "recompute" and self._estimate(fewer) + shift <= 0:
                chosen = fewer
        return chosen

    def learn(self, chosen: Sequence[int], excess: int) -> None:
        """Take note of what the judge found."""
        count = len(chosen)
        if list(chosen) == list(range(count)):
            self.excess[count] = excess
            self.shift = excess - self._estimates[count]
