"""Settlement of candidates that nearly fit into memory: less warm-up, or another activation policy.

Estimates of memory leave things out (`stage_costs`), so an outline that was thought to fit may not. Then the
stages that are too full, and those behind them, keep fewer micro-batches at once; where that is allowed, saved tensors
are recomputed or offloaded instead (`planner.memory.fit_memory`), at the outline's own warm-up and at less of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_pipe.errors import PlanError
from lightning_pipe.planner.candidates.candidate import Candidate, falling
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.memory.fit_memory import fit_by_policies
from lightning_pipe.planner.problem import Problem
from lightning_pipe.units import format_bytes

_TRIES = 4  # depths tried for an outline that does not fit


def settle(problem: Problem, outlines: Iterable[Candidate], *, judge: Judge) -> list[Judged]:
    """Judge outlines, each with its depths lowered as far as memory asks for.

    Args:
        problem: memory of the devices.
        outlines: as the planner ranks them.
        judge: of the same problem.

    Returns:
        What was judged, in the same order: plans that fit first.
    """
    judged = [fitted(problem, outline, judge=judge) for outline in dict.fromkeys(outlines)]
    return sorted(judged, key=lambda found: max(0, found.overflow(problem.cluster)))


def fitted(problem: Problem, outline: Candidate, *, judge: Judge, best_s: float = math.inf) -> Judged:
    """Judge an outline, or what fits into memory of it; if nothing does, what exceeds memory least.

    Args:
        problem: memory of the devices.
        outline: what is judged.
        judge: of the same problem.
        best_s: seconds of a plan that fits. An outline that takes longer cannot win: to need less memory takes time.
    """
    tried = [judge.judge(outline.plan(problem))]
    if tried[0].step_s > best_s:
        return tried[0]
    if (
        tried[0].overflow(problem.cluster) > 0
        and problem.constraints.warmup is None
        and problem.constraints.schedule != "gpipe"
        and problem.policy is None  # which decides how many forwards are in flight
    ):
        tried += _shallower(problem, outline, tried[0], judge=judge)
    tried += squeezed(problem, tried, judge=judge)
    return min(tried, key=lambda one: one.rank(problem.cluster))


def squeezed(problem: Problem, judged: Sequence[Judged], *, judge: Judge) -> list[Judged]:
    """Judge plans that do not fit again, with optimizer state shared and saved tensors given up, as far as wished.

    Args:
        problem: memory of the devices.
        judged: variants of a plan, of which the first one decides whether there is need.
        judge: of the same problem.
    """
    if judged[0].overflow(problem.cluster) <= 0 or not problem.training:
        return []
    shared = []
    if problem.constraints.shard_optimizer == "auto":
        full = [one for one in judged if one.overflow(problem.cluster) > 0 and judge.shares_state(one)]
        plans = [replace(one.plan, shard_optimizer=True) for one in full]
        shared = [judge.judge(plan) for plan in plans]
    if not problem.constraints.memory_policies:
        return shared
    return [*shared, *(fit_by_policies(problem, one, judge=judge) for one in (*judged, *shared))]


def _shallower(problem: Problem, outline: Candidate, judged: Judged, *, judge: Judge) -> Iterator[Judged]:
    """Yield the outline with less and less warm-up, until it fits."""
    for _ in range(_TRIES):
        depths = _lowered(problem, outline, judged)
        if depths == outline.depths:
            return
        outline = replace(outline, depths=depths)
        judged = judge.judge(outline.plan(problem))
        yield judged
        if judged.overflow(problem.cluster) <= 0:
            return


def _lowered(problem: Problem, outline: Candidate, judged: Judged) -> tuple[int, ...]:
    """Return depths by which the stages that exceed memory save as much less as they exceed it."""
    samples = problem.samples / outline.microbatches
    peaks, depths = judged.peak_bytes, []
    for s, (ranks, depth) in enumerate(zip(outline.ranks, outline.depths, strict=True)):
        excess = max(peaks[rank] - problem.cluster.device(rank).memory_bytes for rank in ranks)
        share = max(1, math.ceil(samples / len(ranks)))
        saved = judged.prices.saved_bytes(s, share)
        fewer = math.ceil(excess / saved) if excess > 0 and saved else 0
        depths.append(max(1, min(depth, outline.microbatches) - fewer))
    return falling(depths) if tuple(depths) != outline.depths else outline.depths


def check_fits(problem: Problem, judged: Sequence[Judged]) -> None:
    """Refuse plans none of which fits into memory.

    Args:
        problem: memory of the devices.
        judged: plans, those that fit first.

    Raises:
        PlanError: by how much the best one exceeds memory, and what would help.
    """
    if not judged:
        raise PlanError("The planner found no plan at all; use planner='auto'.")
    least = min(judged, key=lambda found: found.overflow(problem.cluster))
    if least.overflow(problem.cluster) > 0:
        raise PlanError(f"No plan fits into memory. The nearest {shortage(problem, least)}")


def shortage(problem: Problem, judged: Judged) -> str:
    """Return by how much a plan exceeds memory, what takes it, and what would help: a sentence without its subject."""
    rank = max(range(problem.cluster.ranks), key=lambda r: judged.peak_bytes[r] - _memory(problem, r))
    curve, peak, plan = judged.curves[rank], judged.peak_bytes[rank], judged.plan
    stages, count = (counted(n, word) for n, word in ((len(plan.stages), "stage"), (plan.microbatches, "micro-batch")))
    return (
        f"has {stages} and {count}; rank {rank} needs {format_bytes(peak)} "
        f"({format_bytes(curve.state_bytes)} of it parameters, gradients and optimizer, at most "
        f"{format_bytes(curve.peak_bytes)} saved tensors), and has {format_bytes(_memory(problem, rank))}: "
        f"{format_bytes(peak - _memory(problem, rank))} too little. What would help: "
        f"{', '.join(_helps(problem, judged, rank))}."
    )


def counted(count: int, word: str) -> str:
    """Return a number of things, for people."""
    return f"{count} {word}" if count == 1 else f"{count} {word}{'es' if word.endswith('ch') else 's'}"


def _helps(problem: Problem, judged: Judged, rank: int) -> Iterator[str]:
    """Yield what would make a plan fit on its fullest rank."""
    constraints, plan, state = problem.constraints, judged.plan, judged.curves[rank].state_bytes
    holds_state = state < _memory(problem, rank)
    yield f"devices with {format_bytes(judged.peak_bytes[rank])}"
    yield "more devices"
    if holds_state:
        yield "a smaller batch"
    if constraints.microbatches is not None and constraints.microbatches < problem.samples:
        yield "more micro-batches"
    missing = {"recompute", "offload"} - constraints.memory_policies if problem.training and holds_state else set()
    if missing:
        yield f"{' or '.join(sorted(missing))} of saved tensors"
    if constraints.shard_optimizer == "off" and problem.training and not plan.shard_optimizer:
        less = state - Judge(problem).judge(replace(plan, shard_optimizer=True)).curves[rank].state_bytes
        if less > 0:
            yield f"optimizer state shared by replicas (shard_optimizer), {format_bytes(less)} less"


def _memory(problem: Problem, rank: int) -> int:
    return problem.cluster.device(rank).memory_bytes
