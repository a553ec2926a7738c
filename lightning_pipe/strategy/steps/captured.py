"""A captured step, with what it was captured from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_pipe.capture import Request, Route
from lightning_pipe.capture.text_fields import StringReads

AS_ACCUMULATION = "Gradient accumulation has the same difference; microbatches=1 has none."  # of what is said of a step


@dataclass(frozen=True)
class Captured:
    """A captured step.

    Attributes:
        capture: the step.
        request: what was captured.
        reader: knows whether the step read the texts of its batch.
        template: the batch that it was captured with, without its tensors.
        is_weighed: whether numbers have told how losses of the micro-batches of a replayed step are combined.
        differs: whether it was told that micro-batches do not make the loss of the batch.
        harmless: lines where a replayed step divides by what differs between micro-batches, and numbers have told that
            this has no part in the loss: a mean that is logged.
    """

    capture: Route
    request: Request
    reader: StringReads
    template: Any
    is_weighed: bool = False
    differs: bool = False
    harmless: frozenset[str] = frozenset()

    def told(self) -> str:
        """Return in a line how the step was captured, and why so."""
        return f"{self.request.method}: {self.capture.told()}"

    def left_whole(self, reason: str) -> Captured:
        """Return the same for batches that are not cut, for a reason."""
        return replace(self, capture=self.capture.left_whole(reason))

    def with_role(self, role: Literal["mean", "sum"] | None) -> Captured:
        """Return the same with losses of the micro-batches of a replayed step combined in this way; None leaves it."""
        if role is None or self.capture.plays is None or self.capture.record.loss is None:
            return self
        return replace(self, capture=self.capture.plays.with_role(role), is_weighed=True)
