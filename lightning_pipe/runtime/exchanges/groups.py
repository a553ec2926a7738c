"""Communication groups and directed channels, in the one global order in which every rank opens them."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_pipe.core.program import Bucket, Layout, Program, Send
from lightning_pipe.runtime.transport.protocol import Channel, Group, Transport


def bucket_group(bucket: Bucket, layout: Layout) -> Group:
    """Return the ranks that hold any stage of a bucket; each of them contributes one sum."""
    return tuple(sorted({rank for stage in bucket.stages for rank in layout.stages[stage]}))


def stage_group(stage: int, layout: Layout) -> Group:
    """Return the replicas of a stage, ascending."""
    return tuple(sorted(set(layout.stages[stage])))


def everyone(layout: Layout) -> Group:
    """Return all ranks."""
    return tuple(range(layout.ranks))


def channels(program: Program) -> tuple[Channel, ...]:
    """List the (sender, receiver) pairs that a program uses."""
    pairs = {
        (rank, instruction.peer)
        for rank, instructions in enumerate(program.ranks)
        for instruction in instructions
        if isinstance(instruction, Send)
    }
    return tuple(sorted(pairs))


def groups(program: Program) -> tuple[Group, ...]:
    """List the groups of ranks that reduce gradients or buffers, exchange results, or run a head together."""
    layout = program.layout
    found = {everyone(layout)}
    if program.training:
        found.update(bucket_group(bucket, layout) for bucket in program.traffic.buckets)
        found.update(stage_group(stage, layout) for stage in range(len(layout.stages)))
    if program.traffic.head is not None:
        found.add(stage_group(len(layout.stages) - 1, layout))
    return tuple(sorted(group for group in found if len(group) > 1))


def peers(programs: Iterable[Program], rank: int) -> tuple[int, ...]:
    """List the ranks with which a rank exchanges messages, sums gradients, or runs a head."""
    programs = tuple(programs)
    pairs = {pair for program in programs for pair in channels(program)}
    found = {other for pair in pairs if rank in pair for other in pair}
    for program in programs:
        shared = [bucket_group(bucket, program.layout) for bucket in program.traffic.buckets]
        shared += [stage_group(len(program.layout.stages) - 1, program.layout)] if program.traffic.head else []
        found.update(other for group in shared if rank in group for other in group)
    return tuple(sorted(found - {rank}))


def connect(transport: Transport, programs: Iterable[Program]) -> None:
    """Open what the programs use. Every rank calls it with the same programs, before the first of them runs."""
    programs = tuple(programs)
    transport.open(
        channels=tuple(sorted({channel for program in programs for channel in channels(program)})),
        groups=tuple(sorted({group for program in programs for group in groups(program)})),
    )
