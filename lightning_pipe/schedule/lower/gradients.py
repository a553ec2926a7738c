"""When are gradients summed over ranks? A bucket as soon as its rank has computed the last weight gradient in it.

Every rank posts its buckets in ascending number, so that ranks that share several buckets agree; a bucket may therefore
wait for one with a lower number. A rank that holds a stage of the bucket but had no samples takes part all the same,
after everything else it does.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from lightning_pipe.core.program import Compute, Instruction, Program, Reduce
from lightning_pipe.schedule.rules import holders


def add_reductions(program: Program) -> Program:
    """Insert `Reduce` after the last W of its bucket on every rank that holds the bucket.

    A bucket that one rank alone holds needs none. Runs when backwards are as they will be executed.
    """
    if not (program.training and program.synchronise):
        return program
    ranks = tuple(_with_reductions(line, rank, program) for rank, line in enumerate(program.ranks))
    return replace(program, ranks=ranks)


def _with_reductions(line: tuple[Instruction, ...], rank: int, program: Program) -> tuple[Instruction, ...]:
    last = _last_weight_gradients(line)
    after: dict[int, list[Instruction]] = defaultdict(list)
    position = 0
    for number, bucket in enumerate(program.traffic.buckets):
        sharers = holders(bucket, layout=program.layout)
        if rank not in sharers or len(sharers) == 1:
            continue
        own = max((last[stage] for stage in bucket.stages if stage in last), default=len(line) - 1)
        position = max(position, own)
        after[position].append(Reduce(number))
    if not line:
        return tuple(after[0])
    return tuple(out for i, instruction in enumerate(line) for out in (instruction, *after.get(i, ())))


def _last_weight_gradients(line: tuple[Instruction, ...]) -> dict[int, int]:
    """Return by stage the position of its last W (or B)."""
    return {x.stage: i for i, x in enumerate(line) if isinstance(x, Compute) and x.kind in ("W", "B")}
