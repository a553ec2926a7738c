"""Offload of a stage's memory, from right after F until some computes before I.

What a stage offloads leaves the device as soon as F has made it and comes back while other micro-batches compute (after
Peng et al., Capuchin, ASPLOS 2020, which hides the copies of both directions behind computes).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from lightning_pipe.core.program import AnyCompute, Evict, Fetch, Instruction, Program, Send

# Computes between starting a fetch and using it: F, I and W of one micro-batch. Every micro-batch needs the way back
# once, so copies that take longer than these together delay computes however early they start; starting earlier would
# only hold the memory for longer.
AHEAD = 3


def add_swaps(program: Program) -> Program:
    """Insert `Evict` after every F of a stage that offloads, behind its sends, and `Fetch` `AHEAD` computes before I.

    `Fetch` comes no sooner than its `Evict`, so it follows right after where I comes soon after F. Runs when backwards
    are split and sends are placed.
    """
    if not program.training or not program.traffic.offloads:
        return program
    offloads = frozenset(program.traffic.offloads)
    return replace(program, ranks=tuple(_with_swaps(line, offloads) for line in program.ranks))


def _with_swaps(line: tuple[Instruction, ...], offloads: frozenset[int]) -> tuple[Instruction, ...]:
    computes = [(i, x) for i, x in enumerate(line) if isinstance(x, AnyCompute)]
    before: dict[int, list[Instruction]] = defaultdict(list)  # position -> what is posted before it
    evicted: dict[tuple[int, int], int] = {}
    for number, (i, compute) in enumerate(computes):
        if compute.is_joined or compute.stage not in offloads:
            continue
        work = (compute.stage, compute.microbatches[0])
        if compute.kind == "F":
            evicted[work] = _behind_sends(line, i)
            before[evicted[work]].append(Evict(*work))
        elif compute.direction == "B":
            ahead = computes[max(0, number - AHEAD)][0]
            before[max(ahead, evicted.get(work, 0))].append(Fetch(*work))
    return tuple(out for i in range(len(line) + 1) for out in (*before.get(i, ()), *line[i : i + 1]))


def _behind_sends(line: tuple[Instruction, ...], position: int) -> int:
    """Return the first position behind a compute and the sends that follow it."""
    behind = position + 1
    while behind < len(line) and isinstance(line[behind], Send):
        behind += 1
    return behind
