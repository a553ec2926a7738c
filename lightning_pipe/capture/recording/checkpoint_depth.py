"""Count of the calls of `torch.utils.checkpoint.checkpoint` around what runs, outside of units."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class CheckpointDepth:
    """Know whether a step is inside a checkpoint.

    What a checkpoint is given is run once here; the reentrant form would hide where gradients flow.

    Attributes:
        count: calls of `checkpoint` that run, one inside the other.
    """

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter this around what a checkpoint runs."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
