"""Run a command for a number of seconds at most: `for line in BoundedProcess(command, ...).lines(): ...`.

The command leads a process group of its own and writes to a file. So processes that it leaves behind are ended, and
none of them can hold a pipe open.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

GRACE_S = 6.0  # between SIGINT, after which pytest prints its summary, and SIGKILL
LOOK_S = 0.2


class BoundedProcess:
    """Start a command and read what it prints.

    Args:
        command: the words of the command.
        limit_s: seconds after which it is interrupted.
        log: file for what it prints.
        environment: variables to set, beside those of this process.

    Attributes:
        end_s: when it is interrupted, by `time.monotonic`.
        is_cut_off: whether it was interrupted.
    """

    def __init__(
        self, command: Sequence[str], *, limit_s: float, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.is_cut_off = False
        self.end_s = time.monotonic() + limit_s
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def lines(self) -> Iterator[str]:
        """Yield lines as they are printed, until the command has ended or its time is over."""
        partial, runs = "", True
        try:
            with self._log.open(errors="replace") as file:
                while runs:
                    runs = self._runs()
                    *whole, partial = (partial + file.read()).split("\n")
                    yield from whole
            if partial:
                yield partial
        finally:
            self._kill()

    def code(self) -> int:
        """Return the exit status, once the lines have been read."""
        return self._process.wait()

    def _runs(self) -> bool:
        """Wait a moment, interrupt the command if its time is over, and return whether it goes on."""
        try:
            self._process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > self.end_s and not self.is_cut_off:
                self.is_cut_off = True
                os.killpg(self._process.pid, signal.SIGINT)
            return time.monotonic() < self.end_s + GRACE_S
        return False

    def _kill(self) -> None:
        """End what is left of the group."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait()
