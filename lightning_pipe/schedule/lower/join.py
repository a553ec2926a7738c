"""Joined weight gradients: one product for several micro-batches whose W follow each other on a rank.

Source: Rae, Lee and Richings 2024, "2BP: 2-Stage Backpropagation": the delayed backward-p2 of several micro-batches may
be computed on their concatenated samples. Fewer and larger products take less time where micro-batches are small; the
concatenated inputs of W take memory beside the single ones, which are dropped one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_pipe.core.program import Compute, Instruction, Joined, Program, Seam
from lightning_pipe.core.versions import Pin, PinEntry


def join_weight_halves(program: Program, *, most: int) -> Program:
    """Replace W of one stage that follow each other by `Joined` of at most `most`. Runs when backwards are split.

    W of stages that `Traffic.joinable` does not list stay as they are, and so does a W that is left over alone. Of
    micro-batches that read the weights of earlier rounds, each may read others, so they are not joined.
    """
    joinable = frozenset(program.traffic.joinable if most > 1 else ())
    pinned = {} if program.seam is None else _pinned(program.seam)
    return replace(program, ranks=tuple(tuple(_joined(line, joinable, pinned, most)) for line in program.ranks))


def _pinned(seam: Seam) -> dict[int, int]:
    """Return by stage how many of the first micro-batches may read the weights of earlier rounds."""
    if PinEntry.code in seam.work:  # as they entered at stage 0
        return dict.fromkeys(range(len(seam.enters)), seam.enters[0])
    return dict(enumerate(seam.enters)) if Pin.code in seam.work else {}


def _joined(
    line: tuple[Instruction, ...], joinable: frozenset[int], pinned: dict[int, int], most: int
) -> Iterator[Instruction]:
    run: list[Compute] = []
    for instruction in line:
        weight_half = _weight_half(instruction, joinable, pinned)
        if run and (len(run) == most or weight_half is None or weight_half.stage != run[0].stage):
            yield _one(run)
            run = []
        if weight_half is None:
            yield instruction
        else:
            run.append(weight_half)
    if run:
        yield _one(run)


def _weight_half(instruction: Instruction, stages: frozenset[int], pinned: dict[int, int]) -> Compute | None:
    """Return the instruction if it is W of one of the stages, and may be joined."""
    match instruction:
        case Compute(stage, "W", microbatch) if stage in stages and microbatch >= pinned.get(stage, 0):
            return instruction
        case _:
            return None


def _one(run: list[Compute]) -> Instruction:
    return run[0] if len(run) == 1 else Joined(run[0].stage, tuple(compute.microbatch for compute in run))
