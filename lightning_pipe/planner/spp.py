"""Which pipeline has the best bound on its time? After SPP, for devices with any links between them.

After Luo, Yi, Long, Fan, Wu, Yang and Lin, "Efficient Pipeline Planning for Expedited Distributed DNN Training"
(INFOCOM 2022, arXiv 2204.10562), reconstructed from what its abstract says and from recollection:

    RDO   devices in a row, by recursive minimum cuts                                     (`planner.ordering`)
    PRM   stages on neighbouring devices, the slowest stage or link as quick as possible   (`planner.prm`)
    PE    an order of execution in cycles, with a bound on its time                       (`pe_bound`)

A plan's score is PE's bound. PRM minimises a maximum, in which sums of gradients take part once in full (a stage costs
load + sum / M, as it is busy M load + sum) and once not at all; the better score wins. This runs for a few numbers of
micro-batches; the plans with the best scores then get the number and the cuts, among all positions near theirs, with
which they score best.

Time: PRM is O(x V R N^2) for each of at most four numbers of micro-batches, two costs and x numbers of stages; x ends
where even a perfect balance scores worse than what is found. V <= 128 units and N <= 100 positions, fewer of one
where there are many of the other.

Legend: x, S stages, V units, R numbers of units that a stage may take, N positions, M micro-batches, C slowest stage or
link, A sum of gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.planner.blocks import Blocks, DeviceRow, Pipeline, within_memory
from lightning_pipe.planner.cuts import cuttable, nearby, worthwhile
from lightning_pipe.planner.estimate import Estimator, microbatch_counts
from lightning_pipe.planner.ordering import device_order
from lightning_pipe.planner.outline import Outline
from lightning_pipe.planner.prm import partitions, recut
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.segments import Segments

Held = Literal["pa", "one", "none"]

_MOST_UNITS = 128
_MOST_POSITIONS = 100
_POSITIONS_AND_UNITS = 4096  # at most so many positions times units
_LEAST_POSITIONS = 40
_MOST_COUNTS = 4  # numbers of micro-batches for which PRM runs
_MOST_MICROBATCHES = 256
_SUM_PRICES = (1.0, 0.0)
_RETUNED = 12  # drafts that get the best number of micro-batches
_REFINED = 4  # of them, drafts whose cuts are moved to the positions between
_FINE = 200  # positions for that, shared by the cuts of a draft
_MOST_OUTLINES = 8
_TRIES: tuple[tuple[Held, bool], ...] = (  # until there is a partition: memory, and whether shares may be small
    ("pa", False),
    ("one", False),
    ("pa", True),
    ("one", True),
    ("none", False),
    ("none", True),
)


def pe_bound(pipeline: Pipeline, *, microbatches: int) -> float:
    """Return the seconds that a batch takes at most if executed in PE's order.

    PE regards S stages as J = 4S - 3 steps: computes and links forward, then backward, the last stage's F and B being
    one step. In cycle t step j works on micro-batch t - j. No device and no link has more than one forward and one
    backward in a cycle, so every cycle takes at most C, and there are M + J - 1 of them:

        T <= (M + 4S - 4) C + A

    with C the slowest device's F + B or the slowest link's messages there and back, and A the slowest sum of gradients
    (after SPP; own proof by induction over the cycles). Left out: the optimizer.
    """
    slowest = max(*pipeline.loads, *pipeline.links, 0.0)
    return (microbatches + 4 * len(pipeline.loads) - 4) * slowest + max(pipeline.sums)


def pe_depths(stages: int, *, is_free: bool) -> tuple[int, ...]:
    """Return the micro-batches that each stage has in flight under PE: 4 (S - 1 - s) + 1.

    Where links are free their steps vanish, which leaves 2 (S - 1 - s) + 1.
    """
    step = 2 if is_free else 4
    return tuple(step * (stages - 1 - s) + 1 for s in range(stages))


def spp(problem: Problem) -> list[Outline]:
    """Return at most 8 outlines, those that seem to fit into memory first, then by PE's bound."""
    row = DeviceRow(problem.cluster, device_order(problem.cluster), most=_MOST_UNITS)
    most = max(_LEAST_POSITIONS, min(_MOST_POSITIONS, _POSITIONS_AND_UNITS // len(row)))
    drafts = _Search(problem, row, worthwhile(problem, sliced=True, most=most)).drafts()
    cuts = sorted({cut for draft in drafts for cut in draft.cuts})
    estimator = Estimator(Segments(problem, cuts))
    found: dict[Outline, bool] = {}
    for draft in drafts:
        outline, excess = _outline(draft, row, estimator)
        found.setdefault(outline, excess > 0)
    return sorted(found, key=lambda outline: found[outline])[:_MOST_OUTLINES]


def _outline(draft: _Draft, row: DeviceRow, estimator: Estimator) -> tuple[Outline, float]:
    """Return the outline with PE's depths within memory, or those wished for, and the bytes that are missing."""
    firsts = itertools.accumulate(draft.degrees, initial=0)
    ranks = tuple(row.ranks(first, count) for first, count in zip(firsts, draft.degrees, strict=False))
    wishes = estimator.problem.wishes
    if wishes.warmup is not None or wishes.schedule not in (None, "1f1b"):
        outline, _, excess = estimator.outline(draft.cuts, ranks, draft.microbatches)
        return outline, excess
    wanted = pe_depths(len(ranks), is_free=draft.is_free)
    return within_memory(estimator, Outline(draft.cuts, ranks, draft.microbatches, wanted))


@dataclass(frozen=True)
class _Draft:
    """A pipeline on blocks of the row, with its score."""

    cuts: tuple[int, ...]
    degrees: tuple[int, ...]
    microbatches: int
    sum_price: float
    is_free: bool
    score: float

    def rank(self) -> tuple[float, int, tuple[int, ...], tuple[int, ...]]:
        """Order by score, and what scores the same by something that does not change."""
        return self.score, self.microbatches, self.degrees, self.cuts


class _Costs:
    """Costs of PRM, in seconds per micro-batch.

    Args:
        blocks: costs of stages on blocks.
        microbatches: micro-batches per batch.
        sum_price: part of the sums of gradients that counts.
        held: micro-batches in flight that a stage must have memory for: one per stage from it on, one, or none.
    """

    def __init__(self, blocks: Blocks, *, microbatches: int, sum_price: float, held: Held) -> None:
        self._blocks, self._microbatches, self._held = blocks, microbatches, held
        self._price = sum_price / microbatches
        self._known: dict[tuple[int, int], tuple[NDArray[np.float64], NDArray[np.float64], float]] = {}

    def stages(self, first: int, degrees: Sequence[int], behind: int) -> NDArray[np.float64]:
        needed = {"pa": min(behind + 1, self._microbatches), "one": 1, "none": 0}[self._held]
        found = []
        for degree in degrees:
            seconds, in_flight, least = self._stage(first, degree)
            found.append(seconds if least >= needed else np.where(in_flight >= needed, seconds, np.inf))
        return np.stack(found)

    def _stage(self, first: int, degree: int) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
        key = (first, degree)
        if key not in self._known:
            seconds = self._blocks.load_s(first, degree) + self._price * self._blocks.sum_s(first, degree)
            in_flight = self._blocks.in_flight(first, degree)
            self._known[key] = (seconds, in_flight, float(in_flight[np.isfinite(seconds)].min()))
        return self._known[key]

    def links(self, first: int, degree: int, degrees: Sequence[int]) -> NDArray[np.float64]:
        return self._blocks.link_s(first, degree, tuple(degrees))


class _Search:
    """Drafts over some positions.

    Args:
        problem: what is planned.
        row: its devices.
        positions: where PRM may cut.
    """

    def __init__(self, problem: Problem, row: DeviceRow, positions: Sequence[int]) -> None:
        self._problem, self._row = problem, row
        self._segments = Segments(problem, positions)
        self._allowed = cuttable(problem.graph, sliced=True)

    def drafts(self) -> list[_Draft]:
        """Return drafts, the best first."""
        found: set[_Draft] = set()
        for held, may_be_small in _TRIES:
            found = {
                draft for count in self._counts() for draft in self._partitioned(count, held, may_be_small=may_be_small)
            }
            if found:
                break
        best = _best({retuned for draft in _best(found)[:_RETUNED] for retuned in self._retuned(draft)})
        if len(self._segments.bounds) - 2 < len(self._allowed):
            best = _best({*best, *map(self._refined, best[:_REFINED])})
        different = {(draft.degrees, draft.microbatches): draft for draft in reversed(best)}
        return _best(different.values())

    def _counts(self) -> list[int]:
        """Return the numbers of micro-batches for which PRM runs: powers of two from full replication on."""
        wishes, samples = self._problem.wishes, self._problem.samples
        if wishes.microbatches is not None:
            return [min(wishes.microbatches, samples)]
        most = max(1, min(samples // wishes.least_samples, _MOST_MICROBATCHES))
        least = min(most, max(1, samples // (wishes.least_samples * self._problem.cluster.ranks)))
        low, high = math.floor(math.log2(least)), math.floor(math.log2(most))
        return sorted({2 ** round(power) for power in np.linspace(low, high, _MOST_COUNTS)})

    def _degrees(self, microbatches: int, *, may_be_small: bool) -> list[int]:
        """Return the units that a stage may take; by default so that its replicas get their least samples."""
        wishes, samples = self._problem.wishes, self._problem.samples
        most = samples / (microbatches * min(wishes.least_samples, samples))
        devices = max(len(unit) for unit in self._row.units)
        return [degree for degree in self._row.degrees if may_be_small or degree * devices <= most]

    def _partitioned(self, microbatches: int, held: Held, *, may_be_small: bool) -> Iterator[_Draft]:
        """Yield what PRM finds, for every number of stages that may be worth it."""
        blocks = self._blocks(self._segments, microbatches)
        degrees = self._degrees(microbatches, may_be_small=may_be_small)
        for price in _SUM_PRICES:
            costs = _Costs(blocks, microbatches=microbatches, sum_price=price, held=held)
            found = partitions(costs, units=len(self._row), degrees=degrees, last=self._segments.units)
            best = math.inf
            for x, partition in enumerate(found, start=1):
                if partition is not None:
                    draft = self._draft(blocks, partition.bounds, partition.degrees, microbatches, price)
                    best = min(best, draft.score)
                    yield draft
                if (microbatches + 4 * x) * blocks.balanced_s() >= best:  # x + 1 stages cannot score better
                    break

    def _blocks(self, segments: Segments, microbatches: int) -> Blocks:
        return Blocks(segments, self._row, samples=self._problem.samples / microbatches)

    def _draft(
        self, blocks: Blocks, bounds: Sequence[int], degrees: tuple[int, ...], microbatches: int, price: float
    ) -> _Draft:
        pipeline = blocks.pipeline(bounds, degrees)
        cuts = tuple(int(blocks.segments.bounds[bound]) for bound in bounds)
        score = pe_bound(pipeline, microbatches=microbatches)
        return _Draft(cuts, degrees, microbatches, price, not any(pipeline.links), score)

    def _retuned(self, draft: _Draft) -> Iterator[_Draft]:
        """Yield the draft, and the draft with the number of micro-batches that scores best."""
        yield draft
        replicas = max(self._row.devices(first, count) for first, count in _placed(draft.degrees))
        bounds = [int(bound) for bound in np.searchsorted(self._segments.bounds, draft.cuts)]
        counts = microbatch_counts(self._problem, stages=len(draft.degrees), replicas=replicas)
        yield _best(
            self._draft(self._blocks(self._segments, count), bounds, draft.degrees, count, draft.sum_price)
            for count in counts
        )[0]

    def _refined(self, draft: _Draft) -> _Draft:
        """Return the draft with its best cuts among all positions near them."""
        if not draft.cuts:
            return draft
        each = max(1, _FINE // (2 * len(draft.cuts)))
        near = [sorted({cut, *nearby(self._allowed, cut, count=each)}) for cut in draft.cuts]
        segments = Segments(self._problem, sorted({position for window in near for position in window}))
        blocks = self._blocks(segments, draft.microbatches)
        costs = _Costs(blocks, microbatches=draft.microbatches, sum_price=draft.sum_price, held="none")
        placed = _placed(draft.degrees)
        found = recut(
            [costs.stages(first, (count,), 0)[0] for first, count in placed],
            [blocks.link_s(*here, (then,))[0] for here, (_, then) in itertools.pairwise(placed)],
            [np.searchsorted(segments.bounds, window) for window in near],
        )
        assert found is not None, "the cuts of the draft are among them"
        return self._draft(blocks, found.bounds, draft.degrees, draft.microbatches, draft.sum_price)


def _placed(degrees: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first unit, units) of every stage."""
    return list(zip(itertools.accumulate(degrees, initial=0), degrees, strict=False))


def _best(drafts: Iterable[_Draft]) -> list[_Draft]:
    return sorted(drafts, key=_Draft.rank)
