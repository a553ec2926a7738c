"""Well-formedness of layout, sizes and traffic, checked before any instruction is looked at."""

from __future__ import annotations

from lightning_pipe.core.effects import OWN_WORK
from lightning_pipe.core.program import AnyCompute, Edge, Layout, Program, Seam, Traffic
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
    if program.traffic.head is not None and program.seam is not None:
        raise ProgramError(
            "the last stage has a head, which needs all samples of a batch; rounds run batches overlapped"
        )
    if program.seam is not None:
        _check_seam(program, program.seam)
    for rank, line in enumerate(program.ranks):
        for instruction in line:
            if isinstance(instruction, AnyCompute):
                _check_range(instruction, rank, program)


def _check_seam(program: Program, seam: Seam) -> None:
    """Check that forwards in flight fit the layout, the micro-batches and each other."""
    stages, traffic = len(program.layout.stages), program.traffic
    if not program.training:
        raise ProgramError("the program has a seam; only training programs run forwards of later batches")
    if seam.batch < 1 or len(seam.enters) != stages or len(seam.leaves) != stages:
        raise ProgramError(f"{seam}: expected a batch of 1 or more micro-batches, and numbers for {stages} stages")
    if seam.batch + max(seam.leaves) != len(program.sizes):
        raise ProgramError(f"{seam} is about {seam.batch + max(seam.leaves)} micro-batches; found {len(program.sizes)}")
    for name, numbers in (("enters", seam.enters), ("leaves", seam.leaves)):
        if min(numbers) < 0:
            raise ProgramError(f"{seam}: {name} has a number below 0")
        for edge in traffic.edges:
            first, last = sorted((edge.source, edge.target))
            if numbers[first] < numbers[last]:
                raise ProgramError(f"{seam}: {name} grows from stage {first} to stage {last}, which needs its values")
    for stage, (enters, leaves) in enumerate(zip(seam.enters, seam.leaves, strict=True)):
        if enters > seam.batch + leaves:
            raise ProgramError(f"{seam}: {enters} forwards of stage {stage} ran before; the round knows fewer")
        if (enters or leaves) and stage in traffic.offloads:
            raise ProgramError(f"{seam}: stage {stage} runs ahead, so it cannot offload")
        if stage in program.layout.whole and seam.batch % len(program.layout.stages[stage]):
            replicas = len(program.layout.stages[stage])
            raise ProgramError(
                f"{seam}: the {replicas} replicas of stage {stage} take micro-batches in turn; expected a multiple of "
                f"{replicas} micro-batches, so that the next round goes on with the next turn"
            )
    unknown = [code for code in seam.work if code not in OWN_WORK or OWN_WORK[code].effects.law != "versions"]
    if unknown:
        raise ProgramError(f"{seam}: {unknown[0]!r} does not choose weights")
    if "PINOLDER" in seam.work and ("PIN" not in seam.work or max(seam.enters) > seam.batch):
        raise ProgramError(f"{seam}: PINOLDER needs PIN, and a batch of as many micro-batches as forwards run ahead")


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
