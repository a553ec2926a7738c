"""Alternatives to a plan: one device, data parallel training and other plans, evaluated by the same simulator.

Data parallel training is priced as one stage on all ranks with one micro-batch, whose gradients are summed in pieces of
25 MiB while the backward goes on, as by DDP (Li et al., PyTorch Distributed, VLDB 2020). Left out: that sums slow
computes down, and DDP's copies of the buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_pipe.core.cluster import Cluster
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.program import Reduce, Send
from lightning_pipe.planner.candidates.candidate import stage_plans
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.evaluation.rounds import versions_sentence
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.report.advice import Alternative, Kind
from lightning_pipe.units import counted_noun, format_share

_LARGER = 4  # times the samples of a batch, when a larger one is tried
_LARGE_BUBBLE = 0.05  # from which on a larger batch is tried
_LARGE_GAIN = 0.05  # of samples per second, from which on it is worth a sentence


def alternatives(problem: Problem, best: Judged, others: Sequence[Judged]) -> list[Alternative]:
    """Return the plan and what stands against it.

    Args:
        problem: what was planned.
        best: the plan.
        others: other candidates of the planner, best first.
    """
    return [
        replace(_alternative("this plan", "plan", best, problem.cluster), difference=difference_of(best, problem)),
        *_one_device(problem.waiting),
        *(_data_parallel(problem.waiting) if problem.policy is None else ()),  # refused with weight versions
        *_runner_up(problem, best, others),
        *_variants(problem, best, others),
    ]


def chosen_options(constraints: Constraints, *, has_plan: bool = False) -> frozenset[str]:
    """Return the names of the options that the user has set, of those that decide the form of a plan."""
    values = {
        "layout": constraints.replicas,
        "schedule": constraints.schedule if constraints.warmup is None else None,  # which warm-up implies
        "microbatches": constraints.microbatches,
        "stages_per_device": constraints.stages_per_device,
        "plan": has_plan or None,
    }
    return frozenset(name for name, value in values.items() if value is not None)


def difference_of(judged: Judged, problem: Problem) -> str:
    """Return what weight versions change of the training, in a sentence; "" where there are none."""
    if judged.policy is None:
        return ""
    return versions_sentence(problem.constraints.versions, judged.plan, judged.version_bytes)


def _alternative(name: str, kind: Kind, judged: Judged, cluster: Cluster) -> Alternative:
    return Alternative(
        name=name,
        kind=kind,
        microbatches=judged.plan.microbatches,
        step_s=judged.step_s,
        peak_bytes=judged.peak_bytes,
        fits=judged.overflow(cluster) <= 0,
        bubble=judged.bubble,
        bytes_sent=_bytes_sent(judged),
        stages=len(judged.plan.stages),
    )


def _bytes_sent(judged: Judged) -> int:
    """Return the bytes that all ranks send; a ring of n ranks sends 2(n-1) times what it sums."""
    program, prices, alike = judged.program, judged.prices, Counter(judged.representatives)
    messages, posted = 0, Counter[int]()
    for rank, line in enumerate(program.ranks):
        sent = sum(prices.message_bytes(i.message) for i in line if isinstance(i, Send))
        messages += alike[rank] * sent
        posted.update({i.bucket: alike[rank] for i in line if isinstance(i, Reduce)})
    return messages + sum(2 * (ranks - 1) * program.traffic.buckets[b].bytes for b, ranks in posted.items())


def _one_device(problem: Problem) -> Iterator[Alternative]:
    """Yield the training on the first device alone, the batch in one piece."""
    if problem.cluster.ranks == 1:
        return
    first = problem.cluster.hosts[0]
    cluster = Cluster((replace(first, devices=first.devices[:1]),))
    problem = replace(problem, cluster=cluster)
    judged = Judge(problem).judge(Plan((StagePlan("", (0,)),), 1, "gpipe", {}, problem.graph.fingerprint))
    yield _alternative("one device", "one device", judged, cluster)


def _data_parallel(problem: Problem) -> Iterator[Alternative]:
    """Yield the training of one stage on all ranks, as the step allows it: in turns, if they can share no samples."""
    ranks = tuple(range(problem.cluster.ranks))
    if len(ranks) == 1 or problem.samples < len(ranks):
        return
    stages = stage_plans(problem, (), (ranks,))
    microbatches = 1 if stages[0].share == "samples" else problem.constraints.microbatches or len(ranks)
    if stages[0].share == "microbatches" and microbatches < len(ranks):
        return
    judged = Judge(problem).judge(Plan(stages, microbatches, "gpipe", {}, problem.graph.fingerprint))
    yield _alternative("data parallel (DDP)", "data parallel", judged, problem.cluster)


def _runner_up(problem: Problem, best: Judged, others: Sequence[Judged]) -> Iterator[Alternative]:
    """Yield the best candidate with another layout or schedule; the same ones cut elsewhere are no other idea.

    Nor is a schedule that gives the same order under another name.
    """
    same = best.step_s, best.peak_bytes
    for other in others:
        if _idea(other) != _idea(best) and (other.step_s, other.peak_bytes) != same:
            name = f"{other.plan.schedule}, {other.plan.layout_text}, {_microbatches(other)}"
            yield _alternative(name, "runner-up", other, problem.cluster)
            return


def _variants(problem: Problem, best: Judged, others: Sequence[Judged]) -> Iterator[Alternative]:
    """Yield the best candidate of the same layout and schedule for every other number of micro-batches."""
    seen = {best.plan.microbatches}
    for other in others:
        if _idea(other) == _idea(best) and other.plan.microbatches not in seen:
            seen.add(other.plan.microbatches)
            yield _alternative(_microbatches(other), "variant", other, problem.cluster)


def _idea(judged: Judged) -> tuple[str, str]:
    return judged.plan.replicas_text, judged.plan.schedule


def _microbatches(judged: Judged) -> str:
    return counted_noun(judged.plan.microbatches, "micro-batch")


def larger_batch(problem: Problem, best: Judged) -> str:
    """Return, in a sentence, what the same plan gains by a batch of several times the samples; "" if too little.

    The larger batch is simulated, with as many times the micro-batches of the same size, and must fit.
    """
    plan, samples = best.plan, _LARGER * problem.samples
    if len(plan.stages) == 1 or plan.order or best.bubble < _LARGE_BUBBLE or not problem.training:
        return ""
    judged = Judge(replace(problem, samples=samples)).judge(replace(plan, microbatches=_LARGER * plan.microbatches))
    gain = _LARGER * best.step_s / judged.step_s - 1
    if judged.overflow(problem.cluster) > 0 or gain < _LARGE_GAIN:
        return ""
    return (
        f"Predicted: with samples={samples} in {_microbatches(judged)} the bubble shrinks to "
        f"{format_share(judged.bubble)}, and training is {format_share(gain, 0)} faster per sample."
    )
