"""The handlers of `Evict` and `Fetch` on one rank.

Both only start a copy. The backward of the micro-batch waits for the end of the way back; when each copy began and
ended is recorded at the end of the program, so that nobody waits to know.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_pipe.core.effects import OwnWork
from lightning_pipe.core.program import Compute, Evict, Fetch, Instruction
from lightning_pipe.runtime.activations.protocol import HostStore, Parcel
from lightning_pipe.runtime.record import Recorder
from lightning_pipe.runtime.stage import Slices, Stage
from lightning_pipe.runtime.waiting import Wait, Walk

_PATIENCE_S = 1.0  # of one wait for a copy, which will end


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
        """Start the way out; `slices` is what the rank loaded of the micro-batch.

        Where memory is measured, this thread waits for the end and is the last to hold what has left: only releases of
        this thread are seen (`capture.allocations`).
        """
        stage = self._stages[evict.stage]
        seen = stage.leaving(evict.microbatch) if self._recorder.held_bytes is not None else None
        parcel = stage.evict(evict.microbatch, self._host, slices)
        self._parcels[evict.stage, evict.microbatch] = parcel
        while seen is not None and not parcel.left.wait(_PATIENCE_S):
            pass

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
