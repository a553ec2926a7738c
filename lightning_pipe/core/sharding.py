"""Pieces in which gradients are summed, and owners: which rank keeps the optimizer state of a shared parameter.

After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020), stage 1,
"P_os". There every parameter is cut into equal flat parts; here whole parameters are dealt out, so that any optimizer
that steps each parameter by itself (`separable`) steps it as it would without, to the last bit. What that
costs is balance: an owner may have up to one parameter more than its share.

    dealt     largest parameters first, each to the holder that has least so far (Graham 1969, LPT)
    counted   what a rank alone holds counts from the beginning, as its state is there anyway
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

PIECE_BYTES = 25 * 2**20
"""Bytes of a piece in which gradients are summed, as DistributedDataParallel's default bucket."""

GATHERED = 25 * 2**20
"""Bytes of a flat piece in which owners tell what they stepped; a larger parameter is a piece of its own."""

UNDER_WAY = 2
"""Pieces that are there at once."""


def pieces(sizes: Sequence[int], *, most_bytes: int = PIECE_BYTES) -> list[range]:
    """Cut a row of sizes into runs of at most so many bytes; what is larger is a run of its own."""
    runs: list[range] = []
    start = run_bytes = 0
    for i, size in enumerate(sizes):
        if i > start and run_bytes + size > most_bytes:
            runs.append(range(start, i))
            start, run_bytes = i, 0
        run_bytes += size
    return [*runs, range(start, len(sizes))] if sizes else []


def owners(sizes: Mapping[str, int], holders: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return for every parameter the rank that keeps its optimizer state and steps it.

    Args:
        sizes: bytes by parameter, in the order of the module, which decides between equal ones.
        holders: ranks that hold each of them, at least one.
    """
    loads: dict[int, int] = defaultdict(int)
    found = {name: holders[name][0] for name in sizes if len(holders[name]) == 1}
    for name, rank in found.items():
        loads[rank] += sizes[name]
    for name in sorted((name for name in sizes if name not in found), key=lambda name: -sizes[name]):
        found[name] = min(sorted(holders[name]), key=lambda rank: loads[rank])
        loads[found[name]] += sizes[name]
    return {name: found[name] for name in sizes}


def gather_bytes(shared: Sequence[int]) -> int:
    """Return the most bytes of pieces that are there at once while parameters of these sizes are gathered."""
    return min(sum(shared), UNDER_WAY * max([GATHERED, *shared]))
