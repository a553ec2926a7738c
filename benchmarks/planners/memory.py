"""Plans with little memory: a published profile with large layers, with and without recompute.

    python -m benchmarks.planners memory

BERT-32 of Piper (Tarnawski et al., NeurIPS 2021), `bert32a100.json`: 32 layers of 177 MB of parameters, of which each
keeps 606 MB per sample, on one host of equal devices with 25 GB/s links (the file's bandwidth); 32 samples a batch.

State is parameters and their gradients, twice the parameters, as the file counts it (`memoryUsageB`); Adam would
double it. What that means for numbers of devices:

    8 GB, 8 devices     4 layers each: 1.4 GB of state, and up to 20 GB kept by 1F1B; without recompute only pipelines
                        that hold one or two micro-batches fit
    4 GB, 8 devices     a micro-batch of 4 layers is 2.4 GB, so that with state and the gradients of one backward no
                        plan fits that keeps all
    2 GB, 36 devices    a layer each, with room for micro-batches if their stash is not kept
    2 GB, 20 devices    2 layers at most, with room for two micro-batches; the first stage, with the embedding (0.4 GB
                        of state), has room for one layer, so that 16 devices are too few
    1 GB, 36 devices    one layer each needs 354 MB of state, 177 MB of gradients beside those that are summed, and
                        606 MB of stash at once even when it is recomputed, since a layer is one node here: 1.2 GB. So
                        no number of devices suffices without cutting layers, and plans say what is missing. Piper
                        counts what is kept between passes only (48 MB of a layer that is recomputed): by that count,
                        printed beside, 36 devices suffice

Plans of a planner get activation policies (`fit_memory`) at their own depths, at 1F1B's and at lower ones; the best by
the simulator counts. The shares of saved bytes that stages recompute are printed: they fall along the pipeline, as in
the plans that vPipe (Zhao et al., TPDS 2022) published, since early stages hold more micro-batches. (By a few percent
they may not: the first stage keeps inputs that others do not have. Nor where all hold one micro-batch.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_pipe.core.cluster import Cluster, Device, Host, Link
from lightning_pipe.planner.candidates.candidate import Candidate
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.evaluation.resolve import resolve_policies
from lightning_pipe.planner.memory.fit_memory import fit_by_policies
from lightning_pipe.planner.problem import Constraints, MemoryPolicy, Problem
from lightning_pipe.planner.systems.dapple.dapple_planner import dapple
from lightning_pipe.planner.systems.dawnpiper import dawnpiper
from lightning_pipe.profiles.published import load_published

PROFILE = Path(__file__).parents[3] / "shared" / "profiles" / "piper_msr_fiddle" / "bert32a100.json"
LINK = Link(latency_s=5e-6, bytes_per_s=25e9)
SAMPLES = 32
SETTINGS = ((8, 8), (4, 8), (2, 20), (2, 36), (1, 36))  # gigabytes, devices
PLANNERS: dict[str, Callable[[Problem], list[Candidate]]] = {"dapple": dapple, "dawnpiper": dawnpiper}
REMADE_GB = 0.9  # stash and gradients of one layer, and messages: what is there while a layer is recomputed
_OUTLINES = 2  # of each planner
_UNEVEN = 0.05  # of what a stage would save


@dataclass(frozen=True)
class Found:
    """The best plan of a planner.

    Attributes:
        judged: the plan.
        excess: bytes by which its fullest rank exceeds memory; 0 or less if it fits.
        shares: part of what each stage would save that it recomputes.
    """

    judged: Judged
    excess: int
    shares: tuple[float, ...]


def problem(gigabytes: float, devices: int, *policies: MemoryPolicy) -> Problem:
    """Return the problem of a batch on so many devices with so much memory."""
    graph, profile = load_published(PROFILE, optimizer_state=0.0)
    host = Host("host", (Device("A100", round(gigabytes * 1e9)),) * devices, inside=LINK, network=LINK)
    return Problem(
        graph, profile, Cluster((host,)), SAMPLES, constraints=Constraints(memory_policies=frozenset(policies))
    )


def best(asked: Problem, planner: str) -> Found:
    """Return the best plan of a planner: that fits, or else nearly does."""
    judge = Judge(asked)
    judged: list[Judged] = []
    for outline in PLANNERS[planner](asked)[:_OUTLINES]:
        *deeper, shallowest = tried_depths(outline)
        for depths in (shallowest, *deeper):
            judged.append(fit_by_policies(asked, judge.judge(replace(outline, depths=depths).plan(asked)), judge=judge))
            if (judged[-1].overflow(asked.cluster) <= 0) == (depths != shallowest):
                break  # not even the shallowest fits, or the deepest that fits is found
    least = min(judged, key=lambda one: one.rank(asked.cluster))
    return Found(least, least.overflow(asked.cluster), tuple(shares(asked, least)))


def tried_depths(outline: Candidate) -> list[tuple[int, ...]]:
    """Return the depths of an outline, those of 1F1B, and these with fewer and fewer in flight; the deepest first."""
    stages = len(outline.ranks)
    most = [stages // 2**k for k in range(stages.bit_length())]
    lower = (tuple(min(stages - s, limit, outline.microbatches) for s in range(stages)) for limit in most)
    return sorted({outline.depths, *lower}, key=sum, reverse=True)


def shares(asked: Problem, judged: Judged) -> Iterator[float]:
    """Yield the part of what each stage would save that it recomputes."""
    works, tensors = Judge(asked).pricer.works(judged.cuts), asked.graph.tensors
    for work, policy in zip(works, resolve_policies(judged.plan, asked.graph, works), strict=True):
        recomputed = sum(tensors[m].bytes_per_sample for m in policy.recomputed)
        yield recomputed / (sum(tensors[m].bytes_per_sample for m in work.saved) or 1.0)


def kept_bytes(judged: Judged) -> int:
    """Return the most that a rank has in memory between computes, as Piper counts: state, and what is saved."""
    return max(curve.state_bytes + curve.peak_bytes for curve in judged.curves)


def is_falling(shares: Sequence[float]) -> bool:
    """Return whether no share is larger than the one before, but for what the first stage cannot recompute."""
    return all(b <= a + _UNEVEN for a, b in itertools.pairwise(shares))


def main(arguments: Sequence[str] = ()) -> None:
    """Print what fits, with and without recompute."""
    if arguments:
        raise SystemExit(f"memory: found {' '.join(arguments)}; expected no arguments.")
    for gigabytes, devices in SETTINGS:
        for planner in PLANNERS:
            kept = best(problem(gigabytes, devices), planner)
            found = best(problem(gigabytes, devices, "recompute"), planner)
            plan = found.judged.plan
            peaks = [max(found.judged.peak_bytes[rank] for rank in stage.ranks) / 1e9 for stage in plan.stages]
            replicas = plan.replicas_text
            print(f"\n{gigabytes} GB on {devices} devices, {planner}")
            print(f"  all kept    {verdict(kept)}")
            print(f"  recompute   {verdict(found)}; replicas {replicas}, {plan.microbatches} micro-batches")
            shown = " ".join(f"{share:.2f}" for share in found.shares)
            print(f"  shares      {shown} ({'falling' if is_falling(found.shares) else 'not falling'})")
            if found.excess > 0:
                counted = best(problem(gigabytes + REMADE_GB, devices, "recompute"), planner)
                most = kept_bytes(counted.judged) / 1e9
                fits = "fits" if most <= gigabytes and counted.excess <= 0 else "does not fit"
                print(f"  recompute, without what is being remade: {fits}, {most:.2f} GB at most between computes")
            print(f"  peaks [GB]  {' '.join(f'{peak:.2f}' for peak in peaks)}")


def verdict(found: Found) -> str:
    """Return whether a plan fits, in words."""
    if found.excess > 0:
        return f"exceeds memory by {found.excess / 1e9:.2f} GB"
    return f"fits, {found.judged.step_s:.2f} s a batch, warm-up {found.judged.plan.options.get('warmup')}"


if __name__ == "__main__":
    main()
