"""Count of the calls of `torch.utils.checkpoint.checkpoint` around what runs, outside of units."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class CheckpointDepth:
    """Know whether a step is inside a checkpoint.

    What a checkpoint is given is run once here; the reentrant form would hide where gradients flow.

    Args:
        around: entered around each outermost call.

    Attributes:
        count: calls of `checkpoint` that run, one inside the other.
    """

    def __init__(self, around: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext) -> None:
        self.count = 0
        self._around = around

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter this around what a checkpoint runs."""
        self.count += 1
        try:
            with self._around() if self.count == 1 else contextlib.nullcontext():
                yield
        finally:
            self.count -= 1
