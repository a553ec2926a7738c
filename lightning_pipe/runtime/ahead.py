"""Run-ahead: how a rank runs a batch that it begins before all others have ended theirs.

It learns late whether the optimizer step before was right:

    F F F | F I W I W ...    before the first backward: was the step right? If not, all ranks give the program up

The question comes after the warm-up because its answer needs the end of the step before on all ranks, which on the last
ranks is up to a pipeline's depth later (optimizer post-validation, after Qi et al. 2023, "Zero Bubble Pipeline
Parallelism", section 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_pipe.runtime.waiting import Walk


@dataclass(frozen=True)
class Ahead:
    """How one program is run by a rank that is ahead of others.

    Attributes:
        holds: waits for the answer whether the step before was right, and returns it; the same on all ranks.
    """

    holds: Callable[[], Walk[bool]]
