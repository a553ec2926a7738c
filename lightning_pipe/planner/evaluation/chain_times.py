"""Stage times of a plan for schedules that look at times: the prices of its chain, per micro-batch.

Of replicas the slowest counts, of messages between two stages the longest, and of micro-batches the largest. Left out
(`schedule.construct.stage_times`): values that skip stages, sums of gradients, the posting of messages.
"""

from __future__ import annotations

from lightning_pipe.core.cluster import Cluster
from lightning_pipe.core.program import Compute, ComputeKind, Evict
from lightning_pipe.cost.prices import PlanPrices
from lightning_pipe.schedule.construct.merge import stages_by_rank
from lightning_pipe.schedule.construct.stage_times import ChainTimes
from lightning_pipe.schedule.rules import Dataflow


def times_of(prices: PlanPrices, sizes: tuple[int, ...], *, cluster: Cluster) -> ChainTimes:
    """Return the times of a plan.

    Args:
        prices: those of the plan.
        sizes: samples of its micro-batches.
        cluster: memory of its devices.
    """
    found = _Largest(prices, sizes, cluster)
    stages, leaving = range(len(prices.layout.stages)), prices.traffic.offloads
    return ChainTimes(
        forward_s=tuple(found.compute_s(s, "F") for s in stages),
        input_s=tuple(found.compute_s(s, "I") for s in stages),
        weight_s=tuple(found.compute_s(s, "W") for s in stages),
        ahead_s=tuple(found.message_s(s, s + 1) for s in stages[:-1]),
        back_s=tuple(found.message_s(s + 1, s) for s in stages[:-1]),
        saved_bytes=tuple(prices.saved_bytes(s, found.most(s)) for s in stages),
        kept_bytes=tuple(prices.kept_bytes(s, found.most(s)) for s in stages),
        room_bytes=tuple(found.room(rank, held) for rank, held in enumerate(stages_by_rank(prices.layout))),
        copied_bytes=tuple(found.copied_bytes(s) if s in leaving else 0.0 for s in stages) if leaving else (),
        copy_s=tuple(found.copy_s(s) if s in leaving else 0.0 for s in stages) if leaving else (),
    )


_KINDS: tuple[ComputeKind, ...] = ("F", "I", "W")


class _Largest:
    """Costs of the largest micro-batch on the replica that takes longest."""

    def __init__(self, prices: PlanPrices, sizes: tuple[int, ...], cluster: Cluster) -> None:
        self._prices, self._cluster, self._stages = prices, cluster, prices.layout.stages
        self._flow = Dataflow(prices.layout, sizes=sizes, traffic=prices.traffic)
        self._number = largest = max(range(len(sizes)), key=sizes.__getitem__)
        end = min(len(sizes), largest + max(map(len, self._stages)))  # whole micro-batches go round
        self._turns = range(largest, end)

    def compute_s(self, stage: int, kind: ComputeKind) -> float:
        compute, prices = Compute(stage, kind, self._number), self._prices
        return max(prices.compute_s(compute, rank, self._samples(stage, rank)) for rank in self._stages[stage])

    def message_s(self, source: int, target: int) -> float:
        kind: ComputeKind = "F" if source < target else "I"
        sent = (
            (rank, send)
            for m in self._turns
            for rank in self._stages[source]
            for send in self._flow.gives(Compute(source, kind, m), rank=rank)
            if send.message.target == target
        )
        return max((self._prices.transfer_s(send.message, rank, send.peer) for rank, send in sent), default=0.0)

    def most(self, stage: int) -> int:
        return max(self._samples(stage, rank) for rank in self._stages[stage])

    def room(self, rank: int, stages: tuple[int, ...]) -> float:
        computes = [(Compute(s, kind, self._number), self._samples(s, rank)) for s in stages for kind in _KINDS]
        workspace = max(self._prices.workspace_bytes(*compute) for compute in computes)
        return self._cluster.device(rank).memory_bytes - self._prices.state_bytes(rank) - workspace

    def copy_s(self, stage: int) -> float:
        evict, prices = Evict(stage, self._number), self._prices
        return max(prices.own_work_s(evict, rank, self._samples(stage, rank)) for rank in self._stages[stage])

    def copied_bytes(self, stage: int) -> int:
        evict, prices = Evict(stage, self._number), self._prices
        return min(prices.own_work_bytes(evict, rank, self._samples(stage, rank)) for rank in self._stages[stage])

    def _samples(self, stage: int, rank: int) -> int:
        return max(len(self._flow.samples(stage, rank=rank, microbatch=m)) for m in self._turns)
