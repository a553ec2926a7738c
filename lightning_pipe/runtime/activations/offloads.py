"""The handlers of `Evict`, `Vacate` and `Fetch` on one rank.

The first and the last only start a copy. `Vacate` waits for the end of the way out: until then the memory is there, so
that slow copies make a rank late, and never too full. The backward of the micro-batch waits for the end of the way
back; when each copy began and ended is recorded at the end of the program, so that nobody waits to know.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import Compute, Evict, Fetch, Instruction
from lightning_pipe.runtime.activations.protocol import HostStore, Parcel
from lightning_pipe.runtime.record import Recorder
from lightning_pipe.runtime.stage import Slices, Stage
from lightning_pipe.runtime.waiting import Wait, Walk


class Offloads:
    """Copy what stages of this rank offload.

    Args:
        stages: stages of this rank by number.
        host: where it goes.
    """

    def __init__(self, stages: Mapping[int, Stage], host: HostStore) -> None:
        self._stages, self._host = stages, host
        self._parcels: dict[tuple[int, int], Parcel] = {}

    def begin(self, recorder: Recorder) -> None:
        """Forget what an earlier program has copied."""
        self._recorder = recorder
        self._parcels.clear()

    def evict(self, evict: OwnWork, slices: Slices) -> None:
        """Start the way out; `slices` is what the rank loaded of the micro-batch."""
        parcel = self._stages[evict.stage].evict(evict.microbatch, self._host, slices)
        self._parcels[evict.stage, evict.microbatch] = parcel

    def vacate(self, work: OwnWork) -> Walk[None]:
        """Wait for the end of the way out, and give up the memory of what has left."""
        yield Wait(self._parcels[work.stage, work.microbatch].left, Evict(work.stage, work.microbatch))
        self._stages[work.stage].vacate(work.microbatch)

    def fetch(self, fetch: OwnWork) -> None:
        """Start the way back."""
        self._stages[fetch.stage].fetch(fetch.microbatch)

    def collect(self, compute: Compute) -> Walk[None]:
        """Wait until what a compute reads is back."""
        parcel = self._stages[compute.stage].awaited_parcel(compute.microbatch) if compute.direction == "B" else None
        if parcel is not None:
            yield Wait(parcel.returned, Fetch(compute.stage, compute.microbatch))

    def finish(self) -> None:
        """Record when copies ran; all have ended."""
        for (stage, microbatch), parcel in self._parcels.items():
            copies: tuple[Instruction, ...] = (Evict(stage, microbatch), Fetch(stage, microbatch))
            for instruction, (begin, end) in zip(copies, parcel.spans(), strict=True):
                self._recorder.put(instruction, begin, end)
        self._parcels.clear()
