"""Well-formedness of layout, sizes and traffic, checked before any instruction is looked at."""

from __future__ import annotations

from lightning_pipe.core.program import AnyCompute, Edge, Layout, Program, Traffic
from lightning_pipe.errors import ProgramError


def check_frame(program: Program) -> None:
    """Check what instructions refer to: ranks, stages, micro-batches, edges and buckets.

    Raises:
        ProgramError: if a number is out of range or an edge goes the wrong way.
    """
    check_layout(program.layout)
    if not program.sizes or min(program.sizes) < 1:
        raise ProgramError(f"found micro-batches of {program.sizes} samples; every one needs at least 1")
    _check_traffic(program.traffic, stages=len(program.layout.stages))
    if len(program.ranks) != program.layout.ranks:
        raise ProgramError(f"found instructions for {len(program.ranks)} ranks; the layout has {program.layout.ranks}")
    for rank, line in enumerate(program.ranks):
        for instruction in line:
            if isinstance(instruction, AnyCompute):
                _check_range(instruction, rank, program)


def check_layout(layout: Layout) -> None:
    """Check that every stage has ranks, each once, and that its replicas have weights where there are any.

    Raises:
        ProgramError: if a stage has no rank, a negative rank or one twice, if `whole` names an unknown stage, or if
            weights do not fit the replicas.
    """
    if not layout.stages:
        raise ProgramError("the layout has no stages")
    for stage, ranks in enumerate(layout.stages):
        if not ranks or min(ranks) < 0 or len(set(ranks)) != len(ranks):
            raise ProgramError(f"stage {stage} has ranks {ranks}; expected one or more different ranks from 0")
    unknown = sorted(stage for stage in layout.whole if not 0 <= stage < len(layout.stages))
    if unknown:
        raise ProgramError(f"whole micro-batches are asked for stages {unknown}; the layout has {len(layout.stages)}")
    _check_weights(layout)


def _check_weights(layout: Layout) -> None:
    if layout.weights and len(layout.weights) != len(layout.stages):
        raise ProgramError(f"found weights of {len(layout.weights)} stages; the layout has {len(layout.stages)}")
    for stage, weights in enumerate(layout.weights):
        replicas = len(layout.stages[stage])
        if len(weights) != replicas or min(weights) < 1:
            raise ProgramError(
                f"stage {stage} has weights {weights}; expected {replicas} whole numbers from 1, one for each replica"
            )
        if stage in layout.whole and len(set(weights)) > 1:
            raise ProgramError(
                f"stage {stage} has weights {weights}; its replicas take whole micro-batches in turn, so expected "
                "equal weights"
            )


def _check_traffic(traffic: Traffic, *, stages: int) -> None:
    seen = set()
    for edge in traffic.edges:
        key = (edge.direction, edge.source, edge.target)
        if key in seen:
            raise ProgramError(f"edge {_name(edge)} is there twice; expected one edge with all its values")
        seen.add(key)
        forward = edge.source < edge.target
        if not all(0 <= stage < stages for stage in (edge.source, edge.target)):
            raise ProgramError(f"edge {_name(edge)} leaves the {stages} stages of the layout")
        if edge.source == edge.target or forward != (edge.direction == "F"):
            raise ProgramError(f"edge {_name(edge)}: F edges go to a later stage, B edges to an earlier one")
    for number, bucket in enumerate(traffic.buckets):
        if not bucket.stages or not all(0 <= stage < stages for stage in bucket.stages):
            raise ProgramError(f"bucket {number} belongs to stages {bucket.stages}; the layout has {stages} stages")
    if not all(0 <= stage < stages for stage in traffic.loads):
        raise ProgramError(f"stages {traffic.loads} read the batch; the layout has {stages} stages")
    if not all(0 <= stage < stages for stage in traffic.offloads):
        raise ProgramError(f"stages {traffic.offloads} offload; the layout has {stages} stages")
    if not all(0 <= stage < stages for stage in traffic.joinable):
        raise ProgramError(f"stages {traffic.joinable} can join W; the layout has {stages} stages")


def _check_range(compute: AnyCompute, rank: int, program: Program) -> None:
    stages, microbatches = len(program.layout.stages), len(program.sizes)
    if not (0 <= compute.stage < stages and all(0 <= m < microbatches for m in compute.microbatches)):
        raise ProgramError(f"rank {rank}, {compute}: there are {stages} stages and {microbatches} micro-batches")


def _name(edge: Edge) -> str:
    return f"{edge.direction} {edge.source}>{edge.target}"
