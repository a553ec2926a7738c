"""Findings of a section as lines that begin with RESULT, and what a section is given: its device and its time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

MARK = "RESULT "


@dataclass(frozen=True)
class Assignment:
    """What a section works with.

    Attributes:
        section: its name.
        device: "cuda", or "cpu" for the small form that keeps a section working where there is no GPU.
        end_s: when it has to be done, as `time.monotonic()` counts.
        folder: where it may leave files, for the user and for later sections.
    """

    section: str
    device: str
    end_s: float
    folder: Path

    def remaining_s(self) -> float:
        """Return the seconds that are left."""
        return self.end_s - time.monotonic()

    def report(self, text: str) -> None:
        """Print a finding at once."""
        print(f"{MARK}{self.section:8} {text}", flush=True)
