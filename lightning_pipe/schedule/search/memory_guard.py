"""Memory guard (banker's algorithm): a compute begins only if all that has begun can still be finished.

After the banker's algorithm (Dijkstra 1965): after every compute it must be possible to finish the micro-batches one
after another, the oldest first, while the younger stay as they are. On one device that asks, of every open micro-batch,

    what the younger keep + the most that it keeps itself on its way to the end <= room

and since micro-batches ascend on every stage, devices do not wait for each other's memory in a circle. A micro-batch on
its own runs W right after I, and first of all what it has left to do of W.

A device with less room than one micro-batch of all its stages needs is taken to have just that.

Legend: m micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_pipe.core.program import Compute
from lightning_pipe.schedule.construct.devices import ROUNDING, bytes_of, peak_bytes
from lightning_pipe.schedule.construct.stage_times import ChainTimes


class MemoryGuard:
    """What one device keeps, by open micro-batch."""

    def __init__(self, stages: Sequence[int], times: ChainTimes, *, room: float, limit: int) -> None:
        """Begin with nothing.

        Args:
            stages: of the device.
            times: of the pipeline.
            room: bytes that the device has.
            limit: most micro-batches that may be open at once, from their first F to their last W.
        """
        self._times, self._limit = times, limit
        self._alone = tuple(_alone(stages))
        self._bits = {(c.stage, c.kind): 1 << i for i, c in enumerate(self._alone)}
        self._room = max(room, peak_bytes(self._alone, times)) * (1 + ROUNDING)
        self._most = sum(max(times.saved_bytes[s], times.kept_bytes[s]) for s in stages)  # of one micro-batch
        self._open: dict[int, int] = {}  # by micro-batch, ascending: bits of what has run
        self._states: dict[int, tuple[float, float]] = {}

    def put(self, compute: Compute) -> None:
        """Run a compute."""
        m = compute.microbatch
        done = self._open.get(m, 0) | self._bits[compute.stage, compute.kind]
        if done == (1 << len(self._alone)) - 1:
            del self._open[m]
        else:
            self._open[m] = done

    def has_room(self, compute: Compute) -> bool:
        """Return whether all that is open can be finished after a compute."""
        m, is_new = compute.microbatch, compute.microbatch not in self._open
        if is_new and len(self._open) >= self._limit:
            return False
        if bytes_of(compute, self._times) <= 0 or (len(self._open) + is_new) * self._most <= self._room:
            return True
        states = {**self._open, m: self._open.get(m, 0) | self._bits[compute.stage, compute.kind]}
        younger = 0.0
        for done in reversed(states.values()):
            kept, way = self._state(done)
            if younger + max(kept, way) > self._room:
                return False
            younger += kept
        return True

    def _state(self, done: int) -> tuple[float, float]:
        """Return what a micro-batch keeps that has run some computes, and the most that it keeps from then on."""
        if done not in self._states:
            ran = [c for i, c in enumerate(self._alone) if done >> i & 1]
            left = [c for i, c in enumerate(self._alone) if not done >> i & 1]
            waiting = [c for c in left if c.kind == "W" and Compute(c.stage, "I", 0) in ran]
            rest = [c for c in left if c not in waiting]
            kept = sum(bytes_of(c, self._times) for c in ran)
            self._states[done] = kept, kept + peak_bytes([*waiting, *rest], self._times)
        return self._states[done]


def _alone(stages: Sequence[int]) -> Iterator[Compute]:
    """Yield the computes of one micro-batch on a device in the order in which it keeps least."""
    yield from (Compute(s, "F", 0) for s in stages)
    for s in reversed(stages):
        yield Compute(s, "I", 0)
        yield Compute(s, "W", 0)
