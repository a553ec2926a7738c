"""Own work that chooses which weights the computes of a micro-batch read, in pipelines that are never flushed.

Without it F reads the weights of its moment, and I and W those of theirs. A rank steps at the end of every round, so a
forward that ran ahead has read weights that are one or more updates old when its backward runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lightning_pipe.core.effects import Effects, OwnWork, own_work

if TYPE_CHECKING:
    from lightning_pipe.core.program import Program


def _by_seam(_: Program) -> tuple[int, ...]:
    """Return no stage that needs it whatever the seam: `schedule.rules.version_work` says which computes need it."""
    return ()


def _before_forward(verb: str) -> Effects:
    return Effects(
        law="versions", before=("F",), stages=_by_seam, demand="has no such forward to choose for", verb=verb
    )


@own_work
@dataclass(frozen=True, order=True)
class Pin(OwnWork):
    """Let F, I and W of a micro-batch read the weights of this moment, whatever the optimizer does until W has run.

    After Narayanan et al., "PipeDream" (SOSP 2019), section 3.3, weight stashing.
    """

    code: ClassVar[str] = "PIN"
    effects: ClassVar[Effects] = _before_forward("pinned")


@own_work
@dataclass(frozen=True, order=True)
class PinOlder(OwnWork):
    """Let F, I and W of a micro-batch read the weights before the last update.

    After Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021), section 3.1, double buffers.
    """

    code: ClassVar[str] = "PINOLDER"
    effects: ClassVar[Effects] = _before_forward("pinned")


@own_work
@dataclass(frozen=True, order=True)
class PinEntry(OwnWork):
    """Let F, I and W of a micro-batch read the weights that were current when it entered the pipeline, on all stages.

    After Narayanan et al., "PipeDream" (SOSP 2019), section 3.3, vertical sync.
    """

    code: ClassVar[str] = "PINENTRY"
    effects: ClassVar[Effects] = _before_forward("pinned")


@own_work
@dataclass(frozen=True, order=True)
class Predict(OwnWork):
    """Let F of a micro-batch read weights predicted for some updates later.

    After Chen et al., "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform"
    (2018, SpecTrain).
    """

    code: ClassVar[str] = "PREDICT"
    effects: ClassVar[Effects] = _before_forward("predicted")


@own_work
@dataclass(frozen=True, order=True)
class PredictBack(OwnWork):
    """Let I and W of a micro-batch read predicted weights, or corrected ones (PipeMare's discrepancy correction)."""

    code: ClassVar[str] = "PREDICTBACK"
    effects: ClassVar[Effects] = Effects(
        law="versions", before=("I",), stages=_by_seam, demand="has no such backward to choose for", verb="predicted"
    )
