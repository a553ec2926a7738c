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
    layout = prices.layout
    flow = Dataflow(layout, sizes=sizes, traffic=prices.traffic)
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    turns = range(largest, min(len(sizes), largest + max(map(len, layout.stages))))  # whole micro-batches go round

    def samples(stage: int, rank: int) -> int:
        return max(len(flow.samples(stage, rank=rank, microbatch=m)) for m in turns)

    def compute_s(stage: int, kind: ComputeKind) -> float:
        compute = Compute(stage, kind, largest)
        return max(prices.compute_s(compute, rank, samples(stage, rank)) for rank in layout.stages[stage])

    def message_s(source: int, target: int) -> float:
        kind: ComputeKind = "F" if source < target else "I"
        sent = (
            (rank, send)
            for m in turns
            for rank in layout.stages[source]
            for send in flow.gives(Compute(source, kind, m), rank=rank)
            if send.message.target == target
        )
        return max((prices.transfer_s(send.message, rank, send.peer) for rank, send in sent), default=0.0)

    def most(stage: int) -> int:
        return max(samples(stage, rank) for rank in layout.stages[stage])

    def room(rank: int, stages: tuple[int, ...]) -> float:
        workspace = max(
            prices.workspace_bytes(Compute(s, kind, largest), samples(s, rank)) for s in stages for kind in _KINDS
        )
        return cluster.device(rank).memory_bytes - prices.state_bytes(rank) - workspace

    def copy_s(stage: int) -> float:
        evict = Evict(stage, largest)
        return max(prices.own_work_s(evict, rank, samples(stage, rank)) for rank in layout.stages[stage])

    def copied_bytes(stage: int) -> int:
        evict, ranks = Evict(stage, largest), layout.stages[stage]
        return min(prices.own_work_bytes(evict, rank, samples(stage, rank)) for rank in ranks)

    stages, leaving = range(len(layout.stages)), prices.traffic.offloads
    return ChainTimes(
        forward_s=tuple(compute_s(s, "F") for s in stages),
        input_s=tuple(compute_s(s, "I") for s in stages),
        weight_s=tuple(compute_s(s, "W") for s in stages),
        ahead_s=tuple(message_s(s, s + 1) for s in stages[:-1]),
        back_s=tuple(message_s(s + 1, s) for s in stages[:-1]),
        saved_bytes=tuple(prices.saved_bytes(s, most(s)) for s in stages),
        kept_bytes=tuple(prices.kept_bytes(s, most(s)) for s in stages),
        room_bytes=tuple(room(rank, held) for rank, held in enumerate(stages_by_rank(layout))),
        copied_bytes=tuple(copied_bytes(s) if s in leaving else 0.0 for s in stages) if leaving else (),
        copy_s=tuple(copy_s(s) if s in leaving else 0.0 for s in stages) if leaving else (),
    )


_KINDS: tuple[ComputeKind, ...] = ("F", "I", "W")
