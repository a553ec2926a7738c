"""Time windows: the moments between which a compute of a chain must start if all is to end in time.

    head    seconds before which it cannot start
    tail    seconds that are needed after its end

Both follow from messages and from the device: of computes that must all come before b on one device, taken by their
heads, each starts when those before it have ended, and b after the last (Jackson's rule for one machine with release
dates); the same backwards for tails.

Micro-batches ascend in every stage and kind. `must_precede` says what follows from that and from the chain.

Legend: s stage, m micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lightning_pipe.core.program import Compute, ComputeKind, Layout
from lightning_pipe.schedule.construct.stage_times import ChainTimes

KINDS: tuple[ComputeKind, ...] = ("F", "I", "W")


def computes_of(stages: Sequence[int], microbatches: int) -> tuple[Compute, ...]:
    """Return all computes of some stages, each after those that it must follow."""
    return tuple(
        Compute(s, kind, m)
        for m in range(microbatches)
        for kind in KINDS
        for s in (stages if kind == "F" else reversed(stages))
    )


def must_precede(a: Compute, b: Compute) -> bool:
    """Return whether a runs before b in every order."""
    if a.microbatch > b.microbatch or a == b:
        return False
    match a.kind, b.kind:
        case "F", "F":
            return a.stage <= b.stage
        case "F", _:
            return True
        case "I", "I" | "W":
            return a.stage >= b.stage
        case "W", "W":
            return a.stage == b.stage
        case _:
            return False


def inputs_of(compute: Compute, *, stages: int) -> Iterator[Compute]:
    """Yield the computes whose results a compute takes."""
    s, m = compute.stage, compute.microbatch
    match compute.kind:
        case "F" if s > 0:
            yield Compute(s - 1, "F", m)
        case "I" | "B":
            yield Compute(s + 1, "I", m) if s + 1 < stages else Compute(s, "F", m)
        case "W":
            yield Compute(s, "I", m)


class TimeWindows:
    """Heads and tails of all computes of a chain."""

    def __init__(self, layout: Layout, microbatches: int, times: ChainTimes) -> None:
        self._stages, self._times = len(layout.stages), times
        self.computes = computes_of(range(self._stages), microbatches)
        self._held = {
            s: [c for c in self.computes if layout.stages[c.stage] == ranks] for s, ranks in enumerate(layout.stages)
        }
        self.head: dict[Compute, float] = {}
        self.tail: dict[Compute, float] = {}
        for compute in self.computes:
            self.head[compute] = self._head(compute)
        for compute in reversed(self.computes):
            self.tail[compute] = self._tail(compute)

    def least(self) -> float:
        """Return seconds that no order can go below."""
        return max(self.head[c] + self._times.compute_s(c) + self.tail[c] for c in self.computes)

    def delay_s(self, source: Compute, target: Compute) -> float:
        """Return the seconds between the end of a compute and what takes its result."""
        return self._times.message_s(source.stage, target.stage) if source.stage != target.stage else 0.0

    def _head(self, compute: Compute) -> float:
        times = self._times
        inputs = inputs_of(compute, stages=self._stages)
        arrivals = (self.head[c] + times.compute_s(c) + self.delay_s(c, compute) for c in inputs)
        before = [(self.head[c], times.compute_s(c)) for c in self._held[compute.stage] if must_precede(c, compute)]
        return max(*arrivals, _one_after_another(before), 0.0)

    def _tail(self, compute: Compute) -> float:
        """Return the largest need of those that come after: those that take its result, and those of its device."""
        times, s, m = self._times, compute.stage, compute.microbatch
        match compute.kind:
            case "F":
                takers = [Compute(s + 1, "F", m) if s + 1 < self._stages else Compute(s, "I", m)]
            case "I":
                takers = [Compute(s, "W", m), *([Compute(s - 1, "I", m)] if s else [])]
            case _:
                takers = []
        needs = (self.delay_s(compute, c) + times.compute_s(c) + self.tail[c] for c in takers)
        after = [(self.tail[c], times.compute_s(c)) for c in self._held[s] if must_precede(compute, c)]
        return max(*needs, _one_after_another(after), 0.0)


def _one_after_another(jobs: Iterable[tuple[float, float]]) -> float:
    """Return when a machine can have done all jobs, each given as (seconds from which it can run, seconds it takes)."""
    now = 0.0
    for ready, seconds in sorted(jobs):
        now = max(now, ready) + seconds
    return now
