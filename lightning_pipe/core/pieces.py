"""Pieces in which gradients are summed: runs of parameters of at most so many bytes, as buckets of DDP."""

from __future__ import annotations

from collections.abc import Sequence

PIECE_BYTES = 25 * 2**20  # as DistributedDataParallel's default bucket


def pieces(sizes: Sequence[int], *, most_bytes: int = PIECE_BYTES) -> list[range]:
    """Cut a row of sizes into runs of at most so many bytes; what is larger is a run of its own."""
    found: list[range] = []
    start = run_bytes = 0
    for i, size in enumerate(sizes):
        if i > start and run_bytes + size > most_bytes:
            found.append(range(start, i))
            start, run_bytes = i, 0
        run_bytes += size
    return [*found, range(start, len(sizes))] if sizes else []
