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
        as_said: the step with its loss combined as its operations say, if numbers have said otherwise.
        tried_buffers: names of those that micro-batches change to something else than the batch does, as numbers show.
        differs: whether it was told that micro-batches do not make the loss of the batch.
        harmless: lines where a replayed step divides by what differs between micro-batches, and numbers have told that
            this has no part in the loss: a mean that is logged.
    """

    capture: Route
    request: Request
    reader: StringReads
    template: Any
    as_said: Route | None = None
    differs: bool = False
    harmless: frozenset[str] = frozenset()
    tried_buffers: frozenset[str] = frozenset()

    def without_slices(self) -> Captured:
        """Return the same with every node taken for one that may mix samples, so that replicas share none."""
        return replace(self, capture=self.capture.without_slices())

    def told(self) -> str:
        """Return in a line how the step was captured, and why so."""
        return f"{self.request.method}: {self.capture.told()}"

    @property
    def is_weighed(self) -> bool:
        """Return whether numbers have told how losses of micro-batches are combined."""
        return self.as_said is not None

    def left_whole(self, reason: str) -> Captured:
        """Return the same for batches that are not cut, for a reason."""
        return replace(self, capture=self.capture.left_whole(reason))

    def with_role(self, role: Literal["mean", "sum"] | None) -> Captured:
        """Return the same with losses of micro-batches combined in this way; None leaves that as it is."""
        if role is None or self.capture.record.loss is None:
            return self
        return replace(self, capture=self.capture.with_role(role), as_said=self.as_said or self.capture)
