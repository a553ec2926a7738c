"""The orders of torch's looping schedules, to compare with."""

from __future__ import annotations

import pytest

from lightning_pipe.core.program import Compute, Order

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_order(name: str, p: int, v: int, m: int) -> Order:
    """Return the order of a schedule of torch for p devices of v stages each, without its idle places."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, name):
        pytest.skip(f"this torch has no {name}")
    one = object.__new__(getattr(schedules, name))  # its constructor wants stages with process groups
    one.pp_group_size, one.n_local_stages, one._stages, one._n_microbatches = p, v, [None] * v, m
    one.number_of_rounds = max(1, m // p)
    one.microbatches_per_round = m // one.number_of_rounds
    lines = [[a for a in one._calculate_single_rank_operations(rank) if a is not None] for rank in range(p)]
    return tuple(
        tuple(Compute(a.stage_index, KINDS[a.computation_type.name], a.microbatch_index) for a in line)
        for line in lines
    )


def torch_takes(p: int, m: int) -> bool:
    """Return whether torch's schedules with rounds accept so many micro-batches."""
    return m % max(1, m // p) == 0
