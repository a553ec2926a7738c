"""Plan: stages, ranks, micro-batches, schedule, and what becomes of saved tensors.

A plan is a small YAML file (`core.serial`): printed, saved, edited, reused. A stage begins `at` a forward node of the
captured graph (`addmm_7`) or at the first node of a module (`model.blocks.3`); both are resolved against the graph by
`planner.evaluation.resolve`. Stage 0 begins at the start of the graph and says `at: ""`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

from lightning_pipe.core.program import Layout

Share = Literal["samples", "microbatches"]


@dataclass(frozen=True)
class StagePlan:
    """One stage: where it begins, which ranks run it, how these share a micro-batch, and what it does not keep.

    Places in `recompute` and `offload` are names of tensors that F saves (`gelu_3`), or of nodes or modules, which mean
    all saved tensors that are made there. What is named in neither is kept.

    Attributes:
        at: name of a forward node or path of a module at which the stage begins; "" for the first stage.
        ranks: ranks that run the stage, in replica order.
        share: `samples`: replicas take slices of every micro-batch (after DAPPLE); `microbatches`: they take whole
            micro-batches in turn, which keeps batch statistics those of the micro-batch.
        weights: proportions in which replicas share the samples of a micro-batch, one integer each; () in equal parts.
        recompute: places whose saved tensors F drops and the backward recomputes, just before it reads them.
        offload: places whose saved tensors are copied to the host's memory after F, and back before the backward.
        beside_copy: computes of a rank that run beside such a copy after F; then the rank waits for its end, and gives
            the memory up. None: as many as the copy takes, by the times that the plan is judged with.
    """

    at: str
    ranks: tuple[int, ...]
    share: Share = "samples"
    weights: tuple[int, ...] = ()
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    beside_copy: int | None = None


def keeps_all(stage: StagePlan) -> bool:
    """Return whether a stage keeps all that it saves."""
    return not (stage.recompute or stage.offload)


@dataclass(frozen=True)
class Plan:
    """A whole decision.

    Attributes:
        stages: the stages in forward order.
        microbatches: micro-batches per batch.
        schedule: name in `schedule.SCHEDULES`.
        options: options of the schedule, for example `{"warmup": "pb"}`.
        graph: fingerprint of the graph it was made for; "" in a hand-written plan fits any graph.
        order: computes of every rank in their order, such as "0F0 0F1 0B0", where they were decided with the plan; ()
            where the schedule decides them again. Batches with fewer micro-batches leave out those they do not have.
        shard_optimizer: whether ranks that hold the same parameters each keep the optimizer state of a part of them
            (`core.sharding`).
        ignore_checkpoints: whether what `torch.utils.checkpoint` in the module would not keep is kept, unless a stage
            says otherwise; by default it is recomputed, unless a stage offloads it.
    """

    stages: tuple[StagePlan, ...]
    microbatches: int
    schedule: str = "1f1b"
    options: dict[str, int | str] = field(default_factory=dict)
    graph: str = ""
    order: tuple[str, ...] = ()
    shard_optimizer: bool = False
    ignore_checkpoints: bool = False

    @property
    def beside_copies(self) -> tuple[int | None, ...]:
        """Return `beside_copy` of every stage, as lowering takes it."""
        return tuple(stage.beside_copy for stage in self.stages)

    @property
    def replicas_text(self) -> str:
        """Return the numbers of replicas of the stages: `2-1`."""
        return "-".join(str(len(stage.ranks)) for stage in self.stages)

    @cached_property
    def layout(self) -> Layout:
        """Return ranks and sharing of the stages."""
        whole = frozenset(s for s, stage in enumerate(self.stages) if stage.share == "microbatches")
        weights = tuple(stage.weights or (1,) * len(stage.ranks) for stage in self.stages)
        is_even = all(len(set(shares)) == 1 for shares in weights)
        return Layout(tuple(stage.ranks for stage in self.stages), whole, () if is_even else weights)


@lru_cache(maxsize=1024)
def microbatch_sizes(samples: int, microbatches: int) -> tuple[int, ...]:
    """Cut `samples` into at most `microbatches` sizes that differ by at most one, larger ones first."""
    count = min(samples, microbatches)
    return tuple(samples // count + (m < samples % count) for m in range(count))
