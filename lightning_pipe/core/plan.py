"""Plan: stages, ranks, micro-batches, schedule, and what becomes of saved tensors.

A plan is a small YAML file (`core.serial`): printed, saved, edited, reused. A stage begins `at` a forward node of the
captured graph (`addmm_7`) or at the first node of a module (`model.blocks.3`); both are resolved against the graph by
`planner.evaluation.resolve`. Stage 0 begins at the start of the graph and says `at: ""`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Literal

from lightning_pipe.core.program import Layout
from lightning_pipe.units import counted_noun

Share = Literal["samples", "microbatches"]
_SPELLED = 4  # stages up to which `layout_text` lists the replicas of each


@dataclass(frozen=True)
class StagePlan:
    """One stage: where it begins, which ranks run it, how they share a micro-batch, and its activation policy.

    Names in `recompute` and `offload` are those of saved activations (`gelu_3`), or of nodes or modules, which mean all
    their saved outputs. All other saved activations are kept.

    Attributes:
        at: name of a forward node or path of a module at which the stage begins; "" for the first stage.
        ranks: ranks that run the stage, in replica order.
        share: `samples`: replicas take slices of every micro-batch (after DAPPLE); `microbatches`: they take whole
            micro-batches in turn, so that batch statistics cover whole micro-batches.
        weights: proportions in which replicas share the samples of a micro-batch, one integer each; () for equal parts.
        recompute: activations that F drops and the backward computes again, just before it reads them.
        offload: activations that are copied to the host's memory after F, and back before the backward.
        beside_copy: passes that a rank runs during such a copy after F; then the rank waits for the copy and frees the
            memory. None: the number that the copy takes, by the times with which the plan is evaluated.
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
    """A complete plan of a step.

    Attributes:
        stages: the stages in forward order.
        microbatches: micro-batches per batch.
        schedule: name in `schedule.SCHEDULES`.
        options: options of the schedule, for example `{"warmup": "pb"}`.
        graph: fingerprint of the graph it was made for; "" in a hand-written plan fits any graph.
        order: passes of every rank in order, such as "0F0 0F1 0B0", if they were decided with the plan; () if the
            schedule decides them. Batches with fewer micro-batches leave out the passes of the missing ones.
        shard_optimizer: shard the optimizer state over ranks with the same parameters (`core.sharding`).
        ignore_checkpoints: keep the activations that `torch.utils.checkpoint` in the module drops, unless a stage says
            otherwise; by default they are recomputed, unless a stage offloads them.
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

    @property
    def layout_text(self) -> str:
        """Return stages and replicas for people: `2-1`, or `16 stages x 2`, `2 stages x 1, 14 stages x 2`."""
        if len(self.stages) <= _SPELLED:
            return self.replicas_text
        runs = [(count, len(list(run))) for count, run in groupby(len(stage.ranks) for stage in self.stages)]
        return ", ".join(f"{counted_noun(stages, 'stage')} x {count}" for count, stages in runs)

    @cached_property
    def layout(self) -> Layout:
        """Return ranks and sharing of the stages."""
        whole = frozenset(s for s, stage in enumerate(self.stages) if stage.share == "microbatches")
        weights = tuple(stage.weights or (1,) * len(stage.ranks) for stage in self.stages)
        is_even = all(len(set(shares)) == 1 for shares in weights)
        return Layout(tuple(stage.ranks for stage in self.stages), whole, () if is_even else weights)

    @property
    def idle_ranks(self) -> tuple[int, ...]:
        """Return the ranks that compute nothing: more replicas take whole micro-batches than there are."""
        turns = {"microbatches": self.microbatches, "samples": None}
        busy = {rank for stage in self.stages for rank in stage.ranks[: turns[stage.share]]}
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks} - busy))


@lru_cache(maxsize=1024)
def microbatch_sizes(samples: int, microbatches: int) -> tuple[int, ...]:
    """Cut `samples` into at most `microbatches` sizes that differ by at most one, larger ones first."""
    count = min(samples, microbatches)
    return tuple(samples // count + (m < samples % count) for m in range(count))
