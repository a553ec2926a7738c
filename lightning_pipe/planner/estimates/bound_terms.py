"""Terms of the lower bounds: computes, messages and sums of many plans of one problem, each priced once.

The prices are the judge's (`cost.prices`). Plans share most of their parts: a stage costs the same wherever else the
graph is cut and whatever ranks run the others, and so do equal messages between the same ranks.

Legend: s, t stages, i, j replicas, m micro-batch.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_pipe.core.plan import Plan, microbatch_sizes
from lightning_pipe.core.program import Bucket, Compute, Message, Pass
from lightning_pipe.cost.comm import AllReduce, all_reduce_of
from lightning_pipe.cost.prices import PlanPrices, Pricer
from lightning_pipe.planner.candidates.candidate import stage_plans
from lightning_pipe.planner.candidates.moves import Ranks
from lightning_pipe.planner.problem import Problem

Array: TypeAlias = NDArray[np.float64]
Cuts: TypeAlias = tuple[int, ...]
Edge: TypeAlias = tuple[Pass, int, int]  # direction, source, target
Half = Literal["F", "I", "W"]

HALVES: tuple[Half, ...] = ("F", "I", "W")
NEVER = -math.inf  # when what is not sent arrives


class Shares(NamedTuple):
    """One micro-batch on the replicas of a stage; a replica without samples computes and holds nothing.

    Attributes:
        seconds: of F, I and W of every replica.
        held: bytes from F to the end of I, and from there to the end of W, of every replica.
        workspace: bytes of F, I and W of every replica.
        first: the same of the first micro-batch, whose gradients are part of the state.
    """

    seconds: Array
    held: Array
    workspace: Array
    first: Array


class ExchangeTerm(NamedTuple):
    """Messages of a micro-batch between two stages: seconds by sender and receiver, bytes by receiver."""

    seconds: Array
    received: Array


class StageTerm(NamedTuple):
    """One stage: bytes that every replica has beside its state, and the seconds of the optimizer step."""

    rooms: tuple[int, ...]
    step_s: float


class ComputeTerm(NamedTuple):
    """The computes of a stage for a whole batch, in seconds.

    Attributes:
        all: of its busiest replica, and the optimizer step.
        flowing: the same without W of the last micro-batch.
        first, last: F of the first micro-batch and I of the last one, of the quickest replica.
    """

    all: float
    flowing: float
    first: float
    last: float


SumTerms: TypeAlias = list[tuple[float, float]]
"""Of the sums that wait for a stage: a share of its last W, and the seconds that are left when that has passed at least

when the first piece of its own sum is made, when the last one is, and after W, of the longest sum with other stages.
"""
SUM_TERMS = 3


class PlanParts(NamedTuple):
    """One plan: its different micro-batches, each by stage and by edge; its stages; the sums of each (`SUM_TERMS`)."""

    shares: list[list[Shares]]
    exchanges: list[dict[Edge, ExchangeTerm]]
    stages: list[StageTerm]
    sums: list[SumTerms]


class Parts:
    """Price parts of plans of one problem.

    Args:
        problem: what is planned.
        pricer: of its judge.
    """

    def __init__(self, problem: Problem, pricer: Pricer) -> None:
        self.problem, self._pricer = problem, pricer
        names = frozenset(problem.graph.coupled)
        self._coupled = [position for position, node in enumerate(problem.graph.nodes) if node.name in names]
        self._columns: dict[int, tuple[int, ...]] = {}
        self._seconds: dict[tuple[object, ...], Array] = {}
        self._shares: dict[tuple[object, ...], Shares] = {}
        self._stages: dict[tuple[object, ...], StageTerm] = {}
        self._exchanges: dict[tuple[object, ...], ExchangeTerm] = {}
        self._loads: dict[tuple[object, ...], ComputeTerm] = {}
        self._sums: dict[tuple[int, ...], AllReduce] = {}
        self._pieces: dict[tuple[int, ...], tuple[tuple[float, float], tuple[float, float]]] = {}
        self._latest: tuple[Cuts, Ranks, PlanPrices] | None = None

    def columns(self, microbatches: int) -> tuple[int, ...]:
        """Return, for every micro-batch, the first one that costs the same in all plans."""
        if microbatches not in self._columns:
            sizes: tuple[int, ...] = microbatch_sizes(self.problem.samples, microbatches)
            if self._coupled:  # whole micro-batches go to one replica after the other
                sizes = tuple(range(microbatches))
            self._columns[microbatches] = tuple(sizes.index(size) for size in sizes)
        return self._columns[microbatches]

    def plan(self, cuts: Cuts, ranks: Ranks, microbatches: int) -> PlanParts:
        """Return the parts of a plan."""
        sizes, stages = microbatch_sizes(self.problem.samples, microbatches), range(len(ranks))
        different = dict.fromkeys(self.columns(microbatches))
        return PlanParts(
            [[self._shares_of(cuts, ranks, s, m, sizes[m]) for s in stages] for m in different],
            [self._exchanges_of(cuts, ranks, m, sizes[m]) for m in different],
            [self._stage_of(cuts, ranks, s) for s in stages],
            self._sums_of(cuts, ranks),
        )

    def least_s(self, cuts: Cuts, ranks: Ranks, microbatches: int) -> float:
        """Return the seconds that a plan takes at least in any order, as if messages and sums took none.

        forwards before + all computes of a stage, and the input gradients of stages before
        """
        loads = [self._load_of(cuts, ranks, s, microbatches) for s in range(len(ranks))]
        before = after = least = 0.0
        for load in loads:
            least = max(least, before + load.all, before + load.flowing + after)
            before, after = before + load.first, after + load.last
        return least

    def _load_of(self, cuts: Cuts, ranks: Ranks, s: int, microbatches: int) -> ComputeTerm:
        key = (*self._stage(cuts, s), ranks[s], microbatches)
        if key not in self._loads:
            firsts = self.columns(microbatches)
            sizes = microbatch_sizes(self.problem.samples, microbatches)
            counts = Counter(firsts)
            lasting = {m: self._seconds_of(cuts, ranks, s, m, sizes[m]) for m in counts}
            every = np.sum([count * lasting[m] for m, count in counts.items()], axis=(0, 2))
            step_s = self._stage_of(cuts, ranks, s).step_s
            self._loads[key] = ComputeTerm(
                float(every.max()) + step_s,
                float((every - lasting[firsts[-1]][:, 2]).max()) + step_s,
                float(lasting[firsts[0]][:, 0].min()),
                float(lasting[firsts[-1]][:, 1].min()),
            )
        return self._loads[key]

    def _seconds_of(self, cuts: Cuts, ranks: Ranks, s: int, m: int, size: int) -> Array:
        """Return F, I and W of every replica in seconds; most plans are dropped before their bytes are asked for."""
        key = self._share(cuts, ranks, s, m, size)
        if key not in self._seconds:
            prices = self._priced(cuts, ranks)
            self._seconds[key] = np.zeros((len(ranks[s]), len(HALVES)))
            for i, samples in self._samples(prices, s, m, size):
                for h, half in enumerate(self._halves):
                    self._seconds[key][i, h] = prices.compute_s(Compute(s, half, m), ranks[s][i], samples)
        return self._seconds[key]

    def _shares_of(self, cuts: Cuts, ranks: Ranks, s: int, m: int, size: int) -> Shares:
        key = self._share(cuts, ranks, s, m, size)
        if key not in self._shares:
            bytes_ = self._priced_bytes(self._priced(cuts, ranks), s, m, size)
            self._shares[key] = Shares(self._seconds_of(cuts, ranks, s, m, size), *bytes_)
        return self._shares[key]

    def _priced_bytes(self, prices: PlanPrices, s: int, m: int, size: int) -> tuple[Array, Array, Array]:
        """Return what is held, workspaces, and workspaces of the first micro-batch, as `Shares` has them."""
        held, workspace, first = (np.zeros((len(prices.layout.stages[s]), count)) for count in (2, 3, 3))
        for i, samples in self._samples(prices, s, m, size):
            held[i] = prices.saved_bytes(s, samples), prices.kept_bytes(s, samples)
            for h, half in enumerate(self._halves):
                compute = Compute(s, half, m)
                workspace[i, h] = prices.workspace_bytes(compute, samples)
                first[i, h] = max(0.0, workspace[i, h] - prices.gradient_bytes(compute, samples))
        return held, workspace, first

    def _samples(self, prices: PlanPrices, s: int, m: int, size: int) -> Iterator[tuple[int, int]]:
        """Yield the replicas of a stage that have samples of a micro-batch, and how many."""
        for i in range(len(prices.layout.stages[s])):
            if samples := len(prices.layout.samples(s, i, m, size)):
                yield i, samples

    @property
    def _halves(self) -> tuple[Half, ...]:
        return HALVES if self.problem.training else HALVES[:1]

    def _share(self, cuts: Cuts, ranks: Ranks, s: int, m: int, size: int) -> tuple[object, ...]:
        """Return what decides what a micro-batch costs a stage."""
        return (*self._stage(cuts, s), ranks[s], size, m if self._coupled else 0)

    def _exchanges_of(self, cuts: Cuts, ranks: Ranks, m: int, size: int) -> dict[Edge, ExchangeTerm]:
        found: dict[Edge, ExchangeTerm] = {}
        mixed = self._mixed(cuts) if self._coupled else ()
        for edge in self._pricer.traffic(cuts).edges:
            direction, s, t = edge.direction, edge.source, edge.target
            key: tuple[object, ...] = (edge.bytes_per_sample, edge.fixed_bytes, ranks[s], ranks[t], size)
            if mixed:
                key = (*key, m, mixed[s], mixed[t])
            if key not in self._exchanges:
                self._exchanges[key] = _exchange(self._priced(cuts, ranks), (direction, s, t), m, size)
            found[direction, s, t] = self._exchanges[key]
        return found

    def _stage_of(self, cuts: Cuts, ranks: Ranks, s: int) -> StageTerm:
        key = (*self._stage(cuts, s), ranks[s])
        if key not in self._stages:
            prices, cluster = self._priced(cuts, ranks), self.problem.cluster
            rooms = (cluster.device(rank).memory_bytes - prices.state_bytes(rank) for rank in ranks[s])
            step_s = max(prices.step_s(rank) for rank in ranks[s]) if self.problem.training else 0.0
            self._stages[key] = StageTerm(tuple(rooms), step_s)
        return self._stages[key]

    def _sums_of(self, cuts: Cuts, ranks: Ranks) -> list[SumTerms]:
        """Return what is known of the sums of gradients that wait for each stage."""
        longest: list[SumTerms] = [[(1.0, 0.0)] * SUM_TERMS for _ in ranks]
        for bucket in self._pricer.traffic(cuts).buckets if self.problem.training else ():
            held = tuple(sorted({rank for s in bucket.stages for rank in ranks[s]}))
            if len(held) < 2:
                continue
            if held not in self._sums:
                self._sums[held] = all_reduce_of(self.problem.cluster, held)
            seconds = self._sums[held].seconds(bucket.bytes)
            if len(bucket.stages) == 1:
                (s,) = bucket.stages
                pieces = self._pieces_of(cuts, ranks, bucket)
                longest[s][:2] = (pieces[0][0], seconds), (pieces[-1][0], seconds * pieces[-1][1])
            for s in bucket.stages if len(bucket.stages) > 1 else ():
                longest[s][2] = max(longest[s][2], (1.0, seconds))
        return longest

    def _pieces_of(self, cuts: Cuts, ranks: Ranks, bucket: Bucket) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the first and the last piece in which a stage's own gradients are summed."""
        key = (*self._stage(cuts, bucket.stages[0]), bucket.bytes)
        if key not in self._pieces:
            pieces = self._priced(cuts, ranks).piece_shares(bucket)
            self._pieces[key] = pieces[0], pieces[-1]
        return self._pieces[key]

    def _stage(self, cuts: Cuts, s: int) -> tuple[int, int]:
        """Return the positions at which a stage begins and ends."""
        return cuts[s - 1] if s else 0, cuts[s] if s < len(cuts) else len(self.problem.graph.nodes)

    def _mixed(self, cuts: Cuts) -> tuple[bool, ...]:
        """Return for every stage whether it mixes samples, so that its replicas take whole micro-batches."""
        stages = (self._stage(cuts, s) for s in range(len(cuts) + 1))
        return tuple(any(begin <= position < end for position in self._coupled) for begin, end in stages)

    def _priced(self, cuts: Cuts, ranks: Ranks) -> PlanPrices:
        if self._latest is None or self._latest[:2] != (cuts, ranks):
            layout = Plan(stage_plans(self.problem, cuts, ranks), 1).layout
            self._latest = cuts, ranks, self._pricer.price(cuts, layout)
        return self._latest[2]


def _exchange(prices: PlanPrices, edge: Edge, m: int, size: int) -> ExchangeTerm:
    (direction, s, t), layout = edge, prices.layout
    senders, receivers = layout.stages[s], layout.stages[t]
    found = ExchangeTerm(np.full((len(senders), len(receivers)), NEVER), np.zeros(len(receivers)))
    for (i, sender), (j, receiver) in itertools.product(enumerate(senders), enumerate(receivers)):
        common = layout.samples(s, i, m, size) & layout.samples(t, j, m, size)
        if common:
            message = Message(direction, s, t, m, common)
            found.seconds[i, j] = prices.transfer_s(message, sender, receiver)
            found.received[j] += prices.message_bytes(message)
    return found
