"""Delays of gradients in pipelines that are never flushed, counted from the programs of their rounds."""

from __future__ import annotations

from functools import lru_cache

from lightning_pipe.core.program import Edge, Layout, Traffic, VerifiedProgram
from lightning_pipe.schedule.lower import lower
from lightning_pipe.schedule.verification.rounds import verify_rounds
from lightning_pipe.schedule.verification.verify import verify
from lightning_pipe.schedule.weights import WeightPolicy


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
    enters, rounds = tuple[int, ...](), list[VerifiedProgram]()
    for left in reversed(range(count)):
        seam = policy.seam(layout, batch, enters=enters, following=(batch,) * left)
        sizes, traffic = (1,) * (batch + max(seam.leaves)), Traffic(tuple(edges), ())
        order = policy.order(layout, seam)
        rounds.append(verify(lower(order, layout=layout, sizes=sizes, traffic=traffic, seam=seam)))
        enters = seam.leaves
    delays = [0] * stages
    for read in verify_rounds(rounds, policy):
        if read.compute.kind == "F":
            late = read.compute.microbatch // batch - read.version.steps
            delays[read.compute.stage] = max(delays[read.compute.stage], late)
    return tuple(delays)
