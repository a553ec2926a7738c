"""Gradient sums over ranks: a bucket is posted along with the computing of its last weight gradients, or after it.

Along, where one stage alone has the bucket and its last W is that of one micro-batch; the W is told before it begins.
Every rank posts its buckets in ascending number, so that ranks that share several buckets agree; a bucket may therefore
wait for one with a lower number. A rank that holds a stage of the bucket but had no samples takes part all the same,
after everything else it does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_pipe.core.program import AnyCompute, Compute, Instruction, Program, Reduce
from lightning_pipe.schedule.rules import holders


def add_reductions(program: Program) -> Program:
    """Insert `Reduce` before or after the last W of its bucket on every rank that holds the bucket.

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
    before: dict[int, list[Instruction]] = defaultdict(list)
    after: dict[int, list[Instruction]] = defaultdict(list)
    position = -1  # of the compute after or along with which the last bucket so far is posted
    for bucket in shared:
        if rank not in bucket.ranks:
            continue
        own = max((last[stage] for stage in bucket.stages if stage in last), default=len(line) - 1)
        if position < own and len(bucket.stages) == 1 and bucket.stages[0] in last and _is_one_half(line[own]):
            before[own].append(Reduce(bucket.number, along=True))
        else:
            after[max(position, own)].append(Reduce(bucket.number))
        position = max(position, own)
    if not line:
        return tuple(after[-1])
    return tuple(
        out for i, instruction in enumerate(line) for out in (*before.get(i, ()), instruction, *after.get(i, ()))
    )


def _is_one_half(instruction: Instruction) -> bool:
    """Return whether it is the W of one micro-batch."""
    return isinstance(instruction, Compute) and instruction.kind == "W"


def _last_weight_gradients(line: tuple[Instruction, ...]) -> dict[int, int]:
    """Return by stage the position of its last W (or B)."""
    return {x.stage: i for i, x in enumerate(line) if isinstance(x, AnyCompute) and x.kind in ("W", "B")}
