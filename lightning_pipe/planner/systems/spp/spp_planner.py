"""SPP planner: the pipeline with the best bound on its time, for devices with any links between them.

After Luo, Yi, Long, Fan, Wu, Yang and Lin, "Efficient Pipeline Planning for Expedited Distributed DNN Training"
(INFOCOM 2022, arXiv 2204.10562), reconstructed from what its abstract says and from recollection:

    RDO   devices in a row, by recursive minimum cuts                                     (`device_order`)
    PRM   stages on neighbouring devices, the slowest stage or link as quick as possible   (`spp_partition`)
    PE    an order of execution in cycles, with a bound on its time                       (`pe_bound`)

A plan's score is PE's bound. PRM minimises a maximum, in which sums of gradients take part once in full (a stage costs
load + sum / M, as it is busy M load + sum) and once not at all; the better score wins. This runs for a few numbers of
micro-batches; the plans with the best scores then get the number and the cuts, among all positions near theirs, with
which they score best.

Memory: PRM asks for room for what PE has in flight, and where that forbids something also for the least with which no
two stages wait for each other; outlines get PE's depths as far as there is room (`within_memory`).

Time: PRM is O(x V R N^2) for each of at most four numbers of micro-batches, two costs and x numbers of stages; x ends
where even a perfect balance scores worse than what is found. V <= 128 units and N <= 100 positions, and fewer of these
where there are many units.

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

from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.candidates.cut_points import around, cuttable, worthwhile
from lightning_pipe.planner.candidates.device_order import device_order
from lightning_pipe.planner.estimates.block_costs import BlockCosts, DeviceRow, RowSeconds, within_memory
from lightning_pipe.planner.estimates.recurrence import Estimator, microbatch_counts
from lightning_pipe.planner.estimates.stage_costs import StageCostTable
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.systems.spp.spp_partition import partitions, recut

Held = Literal["pe", "pa", "one", "none"]

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
_TRIES: tuple[tuple[tuple[Held, ...], bool], ...] = (  # until there is a partition: memory, and may shares be small
    (("pe", "pa"), False),
    (("one",), False),
    (("pa",), True),
    (("one",), True),
    (("none",), False),
    (("none",), True),
)


def pe_bound(pipeline: RowSeconds, *, microbatches: int, depths: Sequence[int] | None = None) -> float:
    """Return the seconds that a batch takes at most if executed in PE's order.

    PE regards S stages as J = 4S - 3 steps: computes and links forward, then backward, the last stage's F and B being
    one step. In cycle t step j works on micro-batch t - j. No device and no link has more than one forward and one
    backward in a cycle, so every cycle takes at most C, and there are M + J - 1 of them:

        T <= (M + 4S - 4) C + A

    with C the slowest device's F + B or the slowest link's messages there and back, and A the slowest sum of gradients
    (after SPP; own proof by induction over the cycles). Left out: the optimizer.

    Ours, where memory keeps a stage from having as many micro-batches in flight as PE wants (K < 4 (S - 1 - s) + 1):
    the way from its forward to its backward is worth so many seconds R, stages and links behind it included, and K of
    them share it, so that M - 1 of the cycles take max(C, R / K). Then it is a prediction, no bound.

    Args:
        pipeline: seconds of stages and links.
        microbatches: M.
        depths: K of every stage; by default as many as PE wants.
    """
    slowest = max(*pipeline.loads, *pipeline.links, 0.0)
    period = slowest
    if depths is not None:
        way = 0.0
        for load, link, depth in zip(pipeline.loads[::-1], (0.0, *pipeline.links[::-1]), reversed(depths), strict=True):
            way += load + link
            period = max(period, way / depth) if depth < microbatches else period
    return (microbatches - 1) * period + (4 * len(pipeline.loads) - 3) * slowest + max(pipeline.sums)


def pe_depths(stages: int, *, is_free: bool) -> tuple[int, ...]:
    """Return the micro-batches that each stage has in flight under PE: 4 (S - 1 - s) + 1.

    Where links are free their steps vanish, which leaves 2 (S - 1 - s) + 1.
    """
    step = 2 if is_free else 4
    return tuple(step * (stages - 1 - s) + 1 for s in range(stages))


def spp(problem: Problem) -> list[Candidate]:
    """Return at most 8 outlines, those that seem to fit into memory first, then by PE's bound."""
    row = DeviceRow(problem.cluster, device_order(problem.cluster), most=_MOST_UNITS)
    most = max(_LEAST_POSITIONS, min(_MOST_POSITIONS, _POSITIONS_AND_UNITS // len(row)))
    drafts = _Search(problem, row, worthwhile(problem, sliced=True, most=most)).drafts()[:_MOST_OUTLINES]
    outlines = [draft.outline for draft in drafts]
    constraints = problem.constraints
    if constraints.warmup is not None or constraints.schedule not in (None, "1f1b"):
        estimator = Estimator(StageCostTable(problem, sorted({cut for outline in outlines for cut in outline.cuts})))
        outlines = [estimator.outline(draft.cuts, draft.ranks, draft.microbatches)[0] for draft in outlines]
    return list(dict.fromkeys(outlines))


@dataclass(frozen=True)
class _Draft:
    """An outline on blocks of the row: what it was found by, and how good it is.

    Attributes:
        outline: with PE's depths, as far as memory allows them.
        degrees: units of each stage.
        sum_price: part of the sums of gradients that counted when it was found.
        fits: whether it seems to fit into memory.
        score: seconds of a batch by PE's bound.
    """

    outline: Candidate
    degrees: tuple[int, ...]
    sum_price: float
    fits: bool
    score: float

    def rank(self) -> tuple[bool, float, int, tuple[int, ...], tuple[int, ...]]:
        """Order by memory and score, and what is as good by something that does not change."""
        return not self.fits, self.score, self.outline.microbatches, self.degrees, self.outline.cuts


class _Costs:
    """Costs of PRM, in seconds per micro-batch.

    Args:
        blocks: costs of stages on blocks.
        microbatches: micro-batches per batch.
        sum_price: part of the sums of gradients that counts.
        held: micro-batches in flight that a stage must have memory for: PE's, one per stage from it on, one, or none.

    Attributes:
        is_bound: whether memory has forbidden anything.
    """

    def __init__(self, blocks: BlockCosts, *, microbatches: int, sum_price: float, held: Held) -> None:
        self._blocks, self._microbatches, self._held = blocks, microbatches, held
        self._price = sum_price / microbatches
        self.is_bound = False
        self._known: dict[int, tuple[NDArray[np.float64], NDArray[np.float64], float]] = {}
        self._needed = 0
        self._stacked: dict[tuple[int, ...], NDArray[np.float64]] = {}  # for so many needed, by kinds of blocks

    def stages(self, first: int, degrees: Sequence[int], behind: int) -> NDArray[np.float64]:
        wanted = {"pe": 4 * behind + 1, "pa": behind + 1, "one": 1, "none": 0}[self._held]
        needed = min(wanted, self._microbatches)
        if needed != self._needed:
            self._needed, self._stacked = needed, {}
        kinds = tuple(self._blocks.kind(first, degree) for degree in degrees)
        if kinds not in self._stacked:
            self._stacked[kinds] = np.stack([self._stage(first, degree, needed) for degree in degrees])
        return self._stacked[kinds]

    def _stage(self, first: int, degree: int, needed: int) -> NDArray[np.float64]:
        kind = self._blocks.kind(first, degree)
        if kind not in self._known:
            seconds = self._blocks.load_s(first, degree) + self._price * self._blocks.sum_s(first, degree)
            in_flight = self._blocks.in_flight(first, degree)
            self._known[kind] = (seconds, in_flight, float(in_flight[np.isfinite(seconds)].min()))
        seconds, in_flight, least = self._known[kind]
        self.is_bound |= least < needed
        return seconds if least >= needed else np.where(in_flight >= needed, seconds, np.inf)

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
        self._segments = StageCostTable(problem, positions)
        self._estimator = Estimator(self._segments)
        self._allowed = cuttable(problem.graph, sliced=True)

    def drafts(self) -> list[_Draft]:
        """Return drafts, the best first."""
        found: set[_Draft] = set()
        for held, may_be_small in _TRIES:
            for count in self._counts():
                found.update(self._partitioned(count, held, may_be_small=may_be_small))
            if found:
                break
        best = _best({retuned for draft in _best(found)[:_RETUNED] for retuned in self._retuned(draft)})
        if len(self._segments.bounds) - 2 < len(self._allowed):
            best = _best({*best, *map(self._refined, best[:_REFINED])})
        different = {(draft.degrees, draft.outline.microbatches): draft for draft in reversed(best)}
        return _best(different.values())

    def _counts(self) -> list[int]:
        """Return the numbers of micro-batches for which PRM runs: powers of two from full replication on; the most."""
        problem, constraints, samples = self._problem, self._problem.constraints, self._problem.samples
        if constraints.microbatches is not None:
            problem.check_samples(constraints.microbatches)
            return [constraints.microbatches]
        most = max(1, min(samples // constraints.least_samples, _MOST_MICROBATCHES))
        least = min(most, max(1, samples // (constraints.least_samples * self._problem.cluster.ranks)))
        low, high = math.floor(math.log2(least)), math.floor(math.log2(most))
        return sorted({*(2 ** round(power) for power in np.linspace(low, high, _MOST_COUNTS)), most})

    def _degrees(self, microbatches: int, *, may_be_small: bool) -> list[int]:
        """Return the units that a stage may take; by default so that its replicas get their least samples."""
        constraints, samples = self._problem.constraints, self._problem.samples
        most = samples / (microbatches * min(constraints.least_samples, samples))
        devices = max(len(unit) for unit in self._row.units)
        return [degree for degree in self._row.degrees if may_be_small or degree * devices <= most]

    def _partitioned(self, microbatches: int, held: Sequence[Held], *, may_be_small: bool) -> Iterator[_Draft]:
        """Yield what PRM finds; with less memory held only if more would forbid something."""
        blocks = self._blocks(self._segments, microbatches)
        degrees = self._degrees(microbatches, may_be_small=may_be_small)
        for price in _SUM_PRICES:
            for wanted in held:
                costs = _Costs(blocks, microbatches=microbatches, sum_price=price, held=wanted)
                yield from self._by_stages(blocks, costs, microbatches=microbatches, degrees=degrees, price=price)
                if not costs.is_bound:
                    break

    def _by_stages(
        self, blocks: BlockCosts, costs: _Costs, *, microbatches: int, degrees: Sequence[int], price: float
    ) -> Iterator[_Draft]:
        """Yield the best partition for every number of stages that may be worth it."""
        best = math.inf
        found = partitions(costs, units=len(self._row), degrees=degrees, last=self._segments.units)
        for x, partition in enumerate(found, start=1):
            if partition is not None:
                draft = self._draft(self._estimator, blocks, partition.bounds, partition.degrees, price)
                best = min(best, draft.score)
                yield draft
            if (microbatches + 4 * x) * blocks.balanced_s() >= best:  # x + 1 stages cannot score better
                return

    def _blocks(self, segments: StageCostTable, microbatches: int) -> BlockCosts:
        return BlockCosts(segments, self._row, samples=self._problem.samples / microbatches)

    def _draft(
        self, estimator: Estimator, blocks: BlockCosts, bounds: Sequence[int], degrees: tuple[int, ...], price: float
    ) -> _Draft:
        pipeline = blocks.pipeline(bounds, degrees)
        cuts = tuple(int(estimator.segments.bounds[bound]) for bound in bounds)
        ranks = tuple(self._row.ranks(first, count) for first, count in _placed(degrees))
        microbatches = round(self._problem.samples / blocks.samples)
        wanted = pe_depths(len(ranks), is_free=not any(pipeline.links))
        outline, missing = within_memory(estimator, Candidate(cuts, ranks, microbatches, wanted))
        score = pe_bound(pipeline, microbatches=microbatches, depths=outline.depths)
        return _Draft(outline, degrees, price, missing <= 0, score)

    def _retuned(self, draft: _Draft) -> Iterator[_Draft]:
        """Yield the draft, if its replicas get enough samples, and that with the best number of micro-batches."""
        outline = draft.outline
        bounds = [int(bound) for bound in np.searchsorted(self._segments.bounds, outline.cuts)]
        replicas = max(map(len, outline.ranks))
        counts = microbatch_counts(self._problem, stages=len(outline.ranks), replicas=replicas)
        if outline.microbatches <= counts[-1]:
            yield draft
        others = [self._blocks(self._segments, count) for count in counts]
        yield _best(self._draft(self._estimator, blocks, bounds, draft.degrees, draft.sum_price) for blocks in others)[
            0
        ]

    def _refined(self, draft: _Draft) -> _Draft:
        """Return the draft with its best cuts among all positions near them."""
        cuts, microbatches = draft.outline.cuts, draft.outline.microbatches
        if not cuts:
            return draft
        near = [around(self._allowed, (cut,), most=_FINE // len(cuts)) for cut in cuts]
        segments = StageCostTable(self._problem, sorted({position for window in near for position in window}))
        blocks = self._blocks(segments, microbatches)
        costs = _Costs(blocks, microbatches=microbatches, sum_price=draft.sum_price, held="pa")
        placed = _placed(draft.degrees)
        found = recut(
            [costs.stages(first, (count,), len(cuts) - s)[0] for s, (first, count) in enumerate(placed)],
            [blocks.link_s(*here, (then,))[0] for here, (_, then) in itertools.pairwise(placed)],
            [np.searchsorted(segments.bounds, window) for window in near],
        )
        if found is None:  # memory forbids all of them
            return draft
        return self._draft(Estimator(segments), blocks, found.bounds, draft.degrees, draft.sum_price)


def _placed(degrees: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first unit, units) of every stage."""
    return list(zip(itertools.accumulate(degrees, initial=0), degrees, strict=False))


def _best(drafts: Iterable[_Draft]) -> list[_Draft]:
    return sorted(drafts, key=_Draft.rank)
