"""Offload of a stage's memory, from right after F until some computes before I.

What a stage offloads leaves the device as soon as F has made it and comes back while other micro-batches compute (after
Peng et al., Capuchin, ASPLOS 2020, which hides the copies of both directions behind computes).

    F0 EVICT0 F1 F2 VACATE0 F3 ...        two computes beside the way out; then its memory is given up
    ... FETCH0 F7 I3 W3 I0                 `AHEAD` computes beside the way back

A micro-batch that would be fetched before its memory is given up is kept, where it is known when that is: the last ones
of a schedule with a short warm-up, and all of a last stage. Copies would hold its memory twice, and the lanes up.

An order may decide for a stage which micro-batches are offloaded, and where `Vacate` and `Fetch` stand. The others of
the stage are kept then, and only `Evict` is added. Of stages that do not offload, whose plan may have been made for
another graph, such places are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_pipe.core.program import AnyCompute, Compute, Evict, Fetch, HostCopy, Instruction, Program, Send, Vacate

# Computes between starting a fetch and using it: F, I and W of one micro-batch. Every micro-batch needs the way back
# once, so copies that take longer than these together delay computes however early they start; starting earlier would
# only hold the memory for longer.
AHEAD = 3


def add_swaps(program: Program, *, beside: Sequence[int | None] = ()) -> Program:
    """Insert the three parts of an offload for every micro-batch of a stage that offloads, where the order places none.

    `Evict` follows F, behind its sends. `Vacate` comes some computes of the rank later, and before I. `Fetch` comes
    `AHEAD` computes before I, but no sooner than `Evict`, so it follows right after where I comes soon after F. Runs
    when backwards are split and messages are placed: a rank that waits for a copy has posted what others wait for.

    Args:
        program: without them.
        beside: by stage, the computes of a rank between F and `Vacate`; None, and where nothing is said, as many as
            there are before I.
    """
    if not program.training:
        return program
    program = replace(program, ranks=tuple(tuple(_offloading(line, program)) for line in program.ranks))
    placed = {x.stage for line in program.ranks for x in line if isinstance(x, HostCopy)}
    free = [stage for stage in program.traffic.offloads if stage not in placed]
    counts = {stage: beside[stage] if stage < len(beside) else None for stage in free}
    return replace(program, ranks=tuple(_with_swaps(line, counts) for line in program.ranks))


def _offloading(line: tuple[Instruction, ...], program: Program) -> Iterator[Instruction]:
    """Yield a line without the copies of stages that do not offload."""
    for x in line:
        if not isinstance(x, HostCopy) or x.stage in program.traffic.offloads:
            yield x


def _with_swaps(whole: tuple[Instruction, ...], counts: Mapping[int, int | None]) -> tuple[Instruction, ...]:
    """Return the line of a rank with copies; those that it has already come right before the next compute."""
    line = tuple(x for x in whole if not isinstance(x, HostCopy))
    placed = _placed(whole, line)
    works = {(x.stage, x.microbatch) for copies in placed.values() for x in copies}
    computes = [(i, x) for i, x in enumerate(line) if isinstance(x, AnyCompute)]
    before: dict[int, list[Instruction]] = defaultdict(list)  # position -> what is posted before it
    evicted: dict[tuple[int, int], int] = {}
    backwards = {(x.stage, x.microbatches[0]): number for number, (_, x) in enumerate(computes) if x.direction == "B"}
    for number, (i, compute) in enumerate(computes):
        if not isinstance(compute, Compute):
            continue
        work = (compute.stage, compute.microbatch)
        leaves = compute.stage in counts or work in works
        if compute.kind == "F" and leaves:
            last = backwards.get(work, len(computes) - 1)
            count = counts.get(compute.stage)
            behind = last if count is None else min(number + 1 + count, last)
            if count is not None and behind >= last - AHEAD:
                continue  # kept
            evicted[work] = _behind_sends(line, i)
            before[evicted[work]].append(Evict(*work))
            if compute.stage in counts:
                before[computes[behind][0]].append(Vacate(*work))
        elif compute.direction == "B" and compute.stage in counts and work in evicted:
            ahead = computes[max(0, number - AHEAD)][0]
            before[max(ahead, evicted[work])].append(Fetch(*work))
    for position, copies in placed.items():
        before[position] += copies
    return tuple(out for i in range(len(line) + 1) for out in (*before.get(i, ()), *line[i : i + 1]))


def _placed(whole: tuple[Instruction, ...], line: tuple[Instruction, ...]) -> dict[int, list[HostCopy]]:
    """Return what is in `whole` but not in `line`, by the position in `line` of the compute that comes next."""
    computes = (i for i, x in enumerate(line) if isinstance(x, AnyCompute))
    found: dict[int, list[HostCopy]] = defaultdict(list)
    waiting: list[HostCopy] = []
    for x in whole:
        if isinstance(x, HostCopy):
            waiting.append(x)
        elif isinstance(x, AnyCompute):
            found[next(computes)] += waiting
            waiting = []
    found[len(line)] += waiting
    return found


def _behind_sends(line: tuple[Instruction, ...], position: int) -> int:
    """Return the first position behind a compute and the sends that follow it."""
    behind = position + 1
    while behind < len(line) and isinstance(line[behind], Send):
        behind += 1
    return behind
