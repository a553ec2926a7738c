"""The command `lightning-pipe consolidate`: a sharded checkpoint becomes one plain file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from lightning_pipe.units import format_bytes, format_seconds


def run_consolidate(directory: Path, out: Path, *, weights_only: bool) -> Iterator[str]:
    """Write the plain file of a sharded checkpoint, and yield how large it is."""
    from lightning_pipe.strategy.checkpoints.consolidate import consolidate  # which needs torch

    started = time.perf_counter()
    size = consolidate(directory, out, weights_only=weights_only)
    yield f"Wrote {out} ({format_bytes(size)}) in {format_seconds(time.perf_counter() - started)}."
