"""Merge of the lines of all stages that a rank holds into one order.

Schedules say for every stage in which order its computes run. A rank that holds one stage runs just that. Where a rank
holds several, their lines are merged by list scheduling in unit time: at every moment each free rank starts, among the
next computes of its stages, one whose inputs exist. Of several, forwards come first, because they give work to later
ranks and each line bounds its own memory; then the earliest micro-batch; then the deepest stage.

Because every order comes from one execution in time, the orders of all ranks together cannot deadlock. Inputs are taken
to be those of a chain (F from the stage before, B from the stage after, over all replicas). Edges that skip stages
follow from these, and so does every layout in which a replica leaves some computes out.

Unit time: F takes one unit, B two (I and W), and both give their result after one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lightning_pipe.core.program import Compute, Layout, Order
from lightning_pipe.errors import ProgramError


def merge_stages(lines: Sequence[Sequence[Compute]], *, layout: Layout) -> Order:
    """Return the order of every rank, given the order of computes of every stage.

    Args:
        lines: computes of each stage, in order; every replica of the stage runs the same.
        layout: ranks of each stage.

    Raises:
        ProgramError: if the lines wait for each other in a circle.
    """
    held = stages_by_rank(layout)
    if all(len(stages) <= 1 for stages in held):
        return tuple(tuple(lines[stages[0]]) if stages else () for stages in held)
    execution = _Execution(lines, layout, [_Rank(rank, dict.fromkeys(stages, 0)) for rank, stages in enumerate(held)])
    return execution.run()


def stages_by_rank(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """List the stages that each rank holds, in forward order."""
    return tuple(tuple(s for s, ranks in enumerate(layout.stages) if rank in ranks) for rank in range(layout.ranks))


@dataclass
class _Rank:
    """One rank during the merge: how far each of its stages is, what it has started, until when it is busy."""

    rank: int
    position: dict[int, int]
    started: list[Compute] = field(default_factory=list)
    busy_until: int = 0


class _Execution:
    """Run the lines in unit time."""

    def __init__(self, lines: Sequence[Sequence[Compute]], layout: Layout, ranks: list[_Rank]) -> None:
        self._lines = lines
        self._layout = layout
        self._ranks = ranks
        self._replicas_done: Counter[Compute] = Counter()

    def run(self) -> Order:
        remaining = sum(len(self._lines[stage]) for rank in self._ranks for stage in rank.position)
        now = 0
        while remaining:
            started = [compute for rank in self._ranks if (compute := self._start(rank, now)) is not None]
            if not started and all(rank.busy_until <= now for rank in self._ranks):
                raise ProgramError(f"the stages wait for each other: next are {', '.join(map(str, self._nexts()))}")
            self._replicas_done.update(started)
            remaining -= len(started)
            now += 1
        return tuple(tuple(rank.started) for rank in self._ranks)

    def _start(self, rank: _Rank, now: int) -> Compute | None:
        if rank.busy_until > now:
            return None
        ready = [compute for compute in self._heads(rank) if self._is_ready(compute)]
        if not ready:
            return None
        compute = min(ready, key=lambda c: (c.kind != "F", c.microbatch, -c.stage))
        rank.position[compute.stage] += 1
        rank.started.append(compute)
        rank.busy_until = now + (2 if compute.kind == "B" else 1)
        return compute

    def _heads(self, rank: _Rank) -> Iterable[Compute]:
        lines = ((self._lines[stage], position) for stage, position in rank.position.items())
        return (line[position] for line, position in lines if position < len(line))

    def _is_ready(self, compute: Compute) -> bool:
        source = compute.stage - 1 if compute.kind == "F" else compute.stage + 1
        if not 0 <= source < len(self._lines):
            return True
        replicas = len(self._layout.stages[source])
        return self._replicas_done[Compute(source, compute.kind, compute.microbatch)] == replicas

    def _nexts(self) -> list[Compute]:
        return [compute for rank in self._ranks for compute in self._heads(rank)]
