"""Progress bar on the terminal, for measurements that take more than two seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress

_PATIENCE_S = 2.0


class Bar:
    """Show how much is done, as a context manager.

    Args:
        what: what is being done.
        shown: whether to show anything at all.
    """

    def __init__(self, what: str, *, shown: bool) -> None:
        self._bar = Progress(console=Console(stderr=True), transient=True, disable=not shown)
        self._task = self._bar.add_task(what, total=1.0)
        self._started = time.monotonic()

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, share: float) -> None:
        """Add to what is done; all is 1."""
        self._bar.advance(self._task, share)
        if not self._bar.live.is_started and time.monotonic() - self._started > _PATIENCE_S:
            self._bar.start()
