"""A captured step, with what it was captured from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning_pipe.capture import Request, Route
from lightning_pipe.capture.text_fields import StringReads


@dataclass(frozen=True)
class Captured:
    """A captured step.

    Attributes:
        capture: the step.
        request: what was captured.
        reader: knows whether the step read the texts of its batch.
        template: the batch that it was captured with, without its tensors.
    """

    capture: Route
    request: Request
    reader: StringReads
    template: Any

    def told(self) -> str:
        """Return in a line how the step was captured, and why so."""
        return f"{self.request.method}: {self.capture.told()}"

    def left_whole(self, reason: str) -> Captured:
        """Return the same for batches that are not cut, for a reason."""
        return replace(self, capture=self.capture.left_whole(reason))
