"""What does a planner decide? The plan: stages, ranks, micro-batches, schedule.

A plan is a small YAML file (`core.serial`): printed, saved, edited, reused. A stage begins `at` a forward node of the
captured graph (`addmm_7`) or at the first node of a module (`model.blocks.3`); both are resolved against the graph by
`planner.problem`. Stage 0 begins at the start of the graph and says `at: ""`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_pipe.core.program import Layout

Share = Literal["samples", "microbatches"]


@dataclass(frozen=True)
class StagePlan:
    """One stage: where it begins, which ranks run it, and how its replicas share a micro-batch.

    Attributes:
        at: name of a forward node or path of a module at which the stage begins; "" for the first stage.
        ranks: ranks that run the stage, in replica order.
        share: `samples`: replicas take slices of every micro-batch (after DAPPLE); `microbatches`: they take whole
            micro-batches in turn, which keeps batch statistics those of the micro-batch.
    """

    at: str
    ranks: tuple[int, ...]
    share: Share = "samples"


@dataclass(frozen=True)
class Plan:
    """A whole decision.

    Attributes:
        stages: the stages in forward order.
        microbatches: micro-batches per batch.
        schedule: name in `schedule.SCHEDULES`.
        options: options of the schedule, for example `{"warmup": "pb"}`.
        graph: fingerprint of the graph it was made for; "" in a hand-written plan fits any graph.
    """

    stages: tuple[StagePlan, ...]
    microbatches: int
    schedule: str = "1f1b"
    options: dict[str, int | str] = field(default_factory=dict)
    graph: str = ""

    @property
    def layout(self) -> Layout:
        """Return ranks and sharing of the stages."""
        whole = frozenset(s for s, stage in enumerate(self.stages) if stage.share == "microbatches")
        return Layout(tuple(stage.ranks for stage in self.stages), whole)


def microbatch_sizes(samples: int, microbatches: int) -> tuple[int, ...]:
    """Cut `samples` into at most `microbatches` sizes that differ by at most one, larger ones first."""
    count = min(samples, microbatches)
    return tuple(samples // count + (m < samples % count) for m in range(count))
