"""Traffic of a chain of stages, each of which gives to the next only."""

from __future__ import annotations

import itertools

from lightning_pipe.core.program import Bucket, Edge, Traffic


def chain(stages: int) -> Traffic:
    """Return the traffic of a chain in round numbers: a byte per sample on every edge, a bucket of one for each stage.

    Every stage can join W of several micro-batches.

    Args:
        stages: their number.
    """
    edges = [(Edge("F", s, s + 1, 1.0), Edge("B", s + 1, s, 1.0)) for s in range(stages - 1)]
    buckets = tuple(Bucket((s,), 1) for s in range(stages))
    return Traffic(tuple(itertools.chain(*edges)), buckets, joinable=tuple(range(stages)))
