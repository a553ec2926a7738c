"""What is known after a fit, and how the process of a notebook learns it, which has started the ranks and is none."""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_pipe.core.plan import Plan
from lightning_pipe.lightning_names import pl
from lightning_pipe.report import Comparison
from lightning_pipe.strategy import lightning_private as private

_KEY = "lightning_pipe"


@dataclass(frozen=True)
class FitOutcome:
    """What is known after a fit (or validate, test, predict).

    Attributes:
        plan: that was used; None before it is made.
        comparison: of the first steps with their prediction; on rank 0, once it is known.
        steps_taken_back: optimizer steps that were taken back and taken again.
    """

    plan: Plan | None = None
    comparison: Comparison | None = None
    steps_taken_back: int = 0


def handed_over(trainer: pl.Trainer, outcome: FitOutcome) -> dict[str, Any]:
    """Return outcome and progress of a run for another process: in a file, as they may not fit into a pipe."""
    path = Path(tempfile.mkdtemp()) / "outcome"
    path.write_bytes(pickle.dumps((outcome, private.progress(trainer))))
    return {_KEY: str(path)}


def taken_over(trainer: pl.Trainer, results: dict[str, Any]) -> FitOutcome:
    """Give a trainer the progress that was handed over, and return the outcome."""
    path = Path(results[_KEY])
    outcome, progress = pickle.loads(path.read_bytes())
    private.restore_progress(trainer, progress)
    path.unlink()
    path.parent.rmdir()
    assert isinstance(outcome, FitOutcome)
    return outcome
