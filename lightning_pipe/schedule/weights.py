"""Policies of weight versions: how far forwards run ahead, which weights computes read, and what that promises.

    policy      ahead of stage s of p    F reads               I and W read        versions that a rank holds at once
    stale       p - 1 - s                those of its moment   those of theirs     1
    deep        2 (p - 1 - s)            those of its moment   those of theirs     1
    pipedream   p - 1 - s                those of its moment   those that F read   1 + ceil(ahead / T)
    2bw         p - 1 - s, at most T     one for the batch     those that F read   2
    spectrain   p - 1 - s                predicted             predicted           1, and the predictions

Legend: T micro-batches a batch. The optimizer steps at the end of every round, on every rank.

    pipedream   Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), 3.3
    2bw         Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021), 3.1
    spectrain   Chen, Yang, Cheng, "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU
                Platform" (arXiv 1809.02839, 2018)
    deep        the depth of Kosson et al., "Pipelined Backpropagation at Scale" (MLSys 2021), 3.1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_pipe.core.program import Layout, Order, Seam
from lightning_pipe.schedule.rolling import rolling, seam_of

Promise = Literal["", "micro-batch", "batch"]


@dataclass(frozen=True)
class WeightPolicy:
    """A policy as data.

    Attributes:
        depth: how many micro-batches forwards are ahead, by the number of stages behind.
        work: codes of the own work that chooses weights (`core.versions`).
        promise: what reads one version: F, I and W of a "micro-batch"; those of a whole "batch", on every stage; or
            nothing.
        live: the most versions that a rank holds at once, by how far it is ahead and the micro-batches of a batch.
        within_batch: whether forwards are ahead by one batch at most.
        scratch: copies of its parameters that a rank makes for computes to read, beside versions.
    """

    depth: Callable[[int], int]
    work: tuple[str, ...] = ()
    promise: Promise = ""
    live: Callable[[int, int], int] = lambda ahead, batch: 1
    within_batch: bool = False
    scratch: int = 0

    def ahead(self, layout: Layout, batch: int) -> tuple[int, ...]:
        """Return by stage how many micro-batches forwards are ahead of backwards."""
        depths = [self.depth(behind) for behind in reversed(range(len(layout.stages)))]
        return tuple(min(depth, batch) if self.within_batch else depth for depth in depths)

    def delays(self, layout: Layout, batch: int) -> tuple[int, ...]:
        """Return by stage how many updates the weights that F reads are older, at most, than those that are updated.

        Args:
            layout: one stage per rank, with any replicas.
            batch: micro-batches of a batch.
        """
        delays = [-(-ahead // batch) for ahead in self.ahead(layout, batch)]
        return (max(delays),) * len(delays) if self.promise == "batch" else tuple(delays)

    def seam(self, layout: Layout, batch: int, *, enters: Sequence[int] = (), following: Sequence[int] = ()) -> Seam:
        """Return the seam of a round.

        Args:
            layout: one stage per rank, with any replicas.
            batch: micro-batches of its batch.
            enters: forwards of each stage that ran in earlier rounds; () if nothing is in flight.
            following: micro-batches of each batch that is known to follow.
        """
        known = sum(following[:1] if self.within_batch else following)
        enters = enters or (0,) * len(layout.stages)
        return seam_of(self.ahead(layout, batch), batch=batch, enters=enters, following=known, work=self.work)

    def middle(self, layout: Layout, sizes: tuple[int, ...]) -> tuple[Seam, tuple[int, ...]]:
        """Return the seam of a round in the middle of many, and the samples of its micro-batches.

        Args:
            layout: one stage per rank, with any replicas.
            sizes: samples of the micro-batches of a batch; all batches are alike.
        """
        ahead = self.ahead(layout, len(sizes))
        batches = 1 + -(-max(ahead) // len(sizes))
        seam = self.seam(layout, len(sizes), enters=ahead, following=(len(sizes),) * (batches - 1))
        return seam, (sizes * batches)[: seam.batch + max(seam.leaves)]

    def order(self, layout: Layout, seam: Seam) -> Order:
        """Return the order of a round."""
        return rolling(layout, seam, self.ahead(layout, seam.batch))


POLICIES = {
    "stale": WeightPolicy(lambda behind: behind),
    "deep": WeightPolicy(lambda behind: 2 * behind),
    "pipedream": WeightPolicy(
        lambda behind: behind, ("PIN",), "micro-batch", live=lambda ahead, batch: 1 + -(-ahead // batch)
    ),
    "2bw": WeightPolicy(
        lambda behind: behind, ("PIN", "PINOLDER"), "batch", live=lambda ahead, batch: 2, within_batch=True
    ),
    "spectrain": WeightPolicy(lambda behind: behind, ("PREDICT", "PREDICTBACK"), scratch=1),
}
