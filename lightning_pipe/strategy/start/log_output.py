"""Log output: lines at INFO of this package are shown on rank 0, as Lightning shows its own.

A program that configures logging itself (a handler of the root logger) gets the records there, and nothing is shown
twice. A level that is set for the logger `lightning_pipe` stays.
"""

from __future__ import annotations

import logging
import sys

_PACKAGE = "lightning_pipe"


def show_log(*, rank: int, verbose: bool) -> None:
    """Show what this process logs: lines at INFO on rank 0 if wanted, warnings on every rank."""
    logger = logging.getLogger(_PACKAGE)
    if logger.level in (logging.NOTSET, *_SET.values()):
        logger.setLevel(_SET[verbose and rank == 0])
    if not any(isinstance(handler, _Terminal) for handler in logger.handlers):
        logger.addHandler(_Terminal())


_SET = {True: logging.INFO, False: logging.WARNING}


class _Terminal(logging.Handler):
    """Writes records to the standard error stream of the moment, unless the root logger has a handler."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        if not logging.getLogger().handlers:
            try:
                sys.stderr.write(f"{self.format(record)}\n")
                sys.stderr.flush()
            except Exception:  # as handlers of the standard library do
                self.handleError(record)
