"""Rounds of equal batches, from an empty pipeline to an empty one, and the delays of gradients counted from them."""

from __future__ import annotations

from functools import lru_cache

from lightning_pipe.core.program import Edge, Layout, Traffic, VerifiedProgram
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.rounds import verify_rounds
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import WeightPolicy


def all_rounds(
    policy: WeightPolicy, layout: Layout, *, sizes: tuple[int, ...], traffic: Traffic, batches: int
) -> list[VerifiedProgram]:
    """Return the rounds of some equal batches.

    Args:
        policy: of weight versions.
        layout: one stage per rank, with any replicas.
        sizes: samples of the micro-batches of a batch.
        traffic: between the stages.
        batches: their number.
    """
    rounds, enters = list[VerifiedProgram](), tuple[int, ...]()
    for left in reversed(range(batches)):
        seam = policy.seam(layout, len(sizes), enters=enters, following=(len(sizes),) * left)
        known = (sizes * batches)[: seam.batch + max(seam.leaves)]
        order = policy.order(layout, seam)
        rounds.append(verify(lower(order, layout=layout, sizes=known, traffic=traffic, seam=seam)))
        enters = seam.leaves
    return rounds


@lru_cache(maxsize=64)
def delays_of(policy: WeightPolicy, stages: int, batch: int) -> tuple[int, ...]:
    """Return by stage after how many updates the gradient of a forward is applied, in the middle of a training.

    That is the number of steps that were made before the one that takes the gradient, less those of the weights that
    the forward read, or from which they were predicted. It is counted from programs, and the largest one of the
    micro-batches of a batch, where these differ.

    Args:
        policy: that decides the rounds.
        stages: their number.
        batch: micro-batches between two updates.
    """
    layout, hops = Layout(tuple((rank,) for rank in range(stages))), range(stages - 1)
    edges = [Edge("F", s, s + 1, 0.0) for s in hops] + [Edge("B", s + 1, s, 0.0) for s in hops]
    count = 2 * (-(-max(policy.ahead(layout, batch)) // batch) + 1)  # until rounds are full, and until they are empty
    rounds = all_rounds(policy, layout, sizes=(1,) * batch, traffic=Traffic(tuple(edges), ()), batches=count)
    delays = [0] * stages
    for read in verify_rounds(rounds, policy):
        if read.compute.kind == "F":
            late = read.compute.microbatch // batch - read.version.steps
            delays[read.compute.stage] = max(delays[read.compute.stage], late)
    return tuple(delays)
