"""Collectives in a step: refused with the user's line, where they would wait for ranks that never come.

A step runs on one rank to be traced, and stage by stage afterwards, so no two ranks make the same calls. Nor is there
anything to collect: what a step sees is the whole batch, cut into micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from lightning_pipe.capture.steps.hazards import user_line
from lightning_pipe.capture.torch_private import answered_collectives
from lightning_pipe.errors import CaptureError

_IS_INSIDE = ContextVar("inside a step", default=False)


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Refuse collectives of torch.distributed and of the strategy; entered around every run of a step."""
    token = _IS_INSIDE.set(True)
    try:
        with answered_collectives(refuse_in_step):
            yield
    finally:
        _IS_INSIDE.reset(token)


def refuse_in_step(name: str) -> None:
    """Raise if a step is running in this thread.

    Args:
        name: what was called.

    Raises:
        CaptureError: naming the call and the user's line.
    """
    if not _IS_INSIDE.get():
        return
    line = user_line(2)
    raise CaptureError(
        f"The step calls the collective {name}{f' at {line}' if line else ''}. In a pipeline the ranks run different "
        "parts of the step, so it would wait for ever; and every batch is whole, so there is nothing to collect. "
        "Remove the call, or use self.all_gather(x), which returns x as it does on one device."
    )
