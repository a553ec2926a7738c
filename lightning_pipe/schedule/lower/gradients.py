"""Gradient sums over ranks: a bucket is posted as soon as its rank has computed its last weight gradient.

Every rank posts its buckets in ascending number, so that ranks that share several buckets agree; a bucket may therefore
wait for one with a lower number. A rank that holds a stage of the bucket but had no samples takes part all the same,
after everything else it does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_pipe.core.program import AnyCompute, Instruction, Program, Reduce
from lightning_pipe.schedule.rules import holders


def add_reductions(program: Program) -> Program:
    """Insert `Reduce` after the last W of its bucket on every rank that holds the bucket.

    A bucket that one rank alone holds needs none. Runs when backwards are as they will be executed.
    """
    if not (program.training and program.synchronise):
        return program
    shared = [_Shared(n, b.stages, holders(b, layout=program.layout)) for n, b in enumerate(program.traffic.buckets)]
    shared = [bucket for bucket in shared if len(bucket.ranks) > 1]
    ranks = tuple(_with_reductions(line, rank, shared) for rank, line in enumerate(program.ranks))
    return replace(program, ranks=ranks)


class _Shared(NamedTuple):
    """A bucket that several ranks hold."""

    number: int
    stages: tuple[int, ...]
    ranks: frozenset[int]


def _with_reductions(line: tuple[Instruction, ...], rank: int, shared: Sequence[_Shared]) -> tuple[Instruction, ...]:
    last = _last_weight_gradients(line)
    after: dict[int, list[Instruction]] = defaultdict(list)
    position = 0
    for bucket in shared:
        if rank not in bucket.ranks:
            continue
        own = max((last[stage] for stage in bucket.stages if stage in last), default=len(line) - 1)
        position = max(position, own)
        after[position].append(Reduce(bucket.number))
    if not line:
        return tuple(after[0])
    return tuple(out for i, instruction in enumerate(line) for out in (instruction, *after.get(i, ())))


def _last_weight_gradients(line: tuple[Instruction, ...]) -> dict[int, int]:
    """Return by stage the position of its last W (or B)."""
    return {x.stage: i for i, x in enumerate(line) if isinstance(x, AnyCompute) and x.kind in ("W", "B")}
