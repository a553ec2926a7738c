"""What activation policies must do: make plans fit, give up no more than is needed, nothing where copies are free."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from cost.sketches import Sketch
from lightning_pipe.core.cluster import NO_SWAP, Cluster, Device, Host, Link
from lightning_pipe.core.graph import Graph, Node
from lightning_pipe.core.plan import Plan, StagePlan
from lightning_pipe.core.profile import Profile
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.evaluation.resolve import resolve_policies
from lightning_pipe.planner.memory.fit_memory import fit_by_policies
from lightning_pipe.planner.memory.offload_budget import Stay, absences, free_copy_s
from lightning_pipe.planner.memory.recompute_selection import Terms, choices
from lightning_pipe.planner.problem import Constraints, MemoryPolicy, Problem

FAST = Link(latency_s=0.0, bytes_per_s=1e12)
MICROBATCHES = 10
WIDE, LINEAR_S, CHEAP_S = 1000.0, 1.0, 0.05  # bytes per sample of what a block saves, seconds of its operations


def blocks(count: int, *, samples: int = 16) -> tuple[Graph, Profile]:
    """Return blocks of x -> linear -> cheap -> cheap, all of which save their inputs."""
    sketch, times = Sketch(count, samples=samples), []
    values: list[list[int]] = []
    x = sketch.batch(per_sample=WIDE)
    for k in range(count):
        values.append([x])
        for name, seconds in (("linear", LINEAR_S), ("gelu", CHEAP_S), ("drop", CHEAP_S)):
            more = {"parameters": (f"w_{k}",)} if name == "linear" else {}
            x = sketch.forward(f"{name}_{k}", k, values[-1][-1], size=(WIDE, 0), **more)
            values[-1].append(x)
            times.append(seconds)
    sketch.results.append(sketch.forward("loss", count - 1, x, size=(0, 4)))
    gradient = sketch.backward("d_loss", count - 1, x, size=(WIDE, 0), reach=0)
    times += [CHEAP_S, CHEAP_S]
    for k in reversed(range(count)):
        x, linear, gelu, _ = values[k]
        for name, saved in (("drop", gelu), ("gelu", linear)):
            gradient = sketch.backward(f"d_{name}_{k}", k, gradient, saved, size=(WIDE, 0), reach=0)
        sketch.gradients.append((sketch.gradient(f"w_{k}", k, gradient, x), f"w_{k}"))
        gradient = sketch.backward(f"d_x_{k}", k, gradient, parameters=(f"w_{k}",), size=(WIDE, 0), reach=0)
        times += [CHEAP_S, CHEAP_S, LINEAR_S, LINEAR_S]
    nodes = tuple(Node(f"n{k}", "op", f"block.{k}", "", (), (), 0, 0, 0, 0) for k in range(count))
    profile = Profile("sketch", "sketch", (1, 2), tuple((seconds, 2 * seconds) for seconds in times))
    return replace(sketch.graph(), nodes=nodes), profile


def asked(
    *policies: MemoryPolicy, memory: float = 1e12, stages: int = 4, swap: Link = NO_SWAP, size: int = 16
) -> tuple[Problem, Plan]:
    """Return a balanced pipeline of `size` blocks on equal devices."""
    graph, profile = blocks(size)
    host = Host("a", (Device("x", int(memory)),) * stages, inside=FAST, network=FAST, swap=swap)
    problem = Problem(
        graph, profile, Cluster((host,)), MICROBATCHES, constraints=Constraints(memory_policies=frozenset(policies))
    )
    begins = ["", *(f"n{s * size // stages}" for s in range(1, stages))]
    plan = Plan(tuple(StagePlan(at, (s,)) for s, at in enumerate(begins)), MICROBATCHES, "1f1b", {"warmup": "pa"})
    return problem, plan


def deep(*policies: MemoryPolicy, part: float, swap: Link) -> tuple[Problem, Plan]:
    """Return eight stages, of which the first hold enough micro-batches to have some of them on the host."""
    return asked(*policies, memory=part * DEEP_PEAK, stages=8, swap=swap)


def fitted(problem: Problem, plan: Plan) -> tuple[Judged, Judged]:
    judge = Judge(problem)
    judged = judge.judge(plan)
    return judged, fit_by_policies(problem, judged, judge=judge)


def share(problem: Problem, judged: Judged) -> list[float]:
    """Return the recomputed share of what each stage would save."""
    works, tensors = Judge(problem).pricer.works(judged.cuts), problem.graph.tensors
    found = resolve_policies(judged.plan, problem.graph, works)
    return [
        sum(tensors[m].bytes_per_sample for m in policy.recomputed)
        / sum(tensors[m].bytes_per_sample for m in work.saved)
        for policy, work in zip(found, works, strict=True)
    ]


PEAKS = fitted(*asked())[0].peak_bytes
DEEP_PEAK = fitted(*asked(stages=8))[0].peak_bytes[0]


@pytest.mark.parametrize("policies", [("recompute",), ("offload",), ("recompute", "offload")])
def test_a_plan_with_policies_fits_or_says_by_how_much_not(policies):
    problem, plan = deep(*policies, part=0.5, swap=Link(0.0, 1000.0))
    judged, found = fitted(problem, plan)
    assert judged.overflow(problem.cluster) > 0
    assert found.overflow(problem.cluster) < judged.overflow(problem.cluster)
    if "recompute" in policies:
        assert found.overflow(problem.cluster) <= 0


LAYOUTS = {
    "replicas": (("", (0, 1)), ("n8", (2,)), ("n12", (3,))),
    "two stages a rank": (("", (0,)), ("n4", (1,)), ("n8", (0,)), ("n12", (1,))),
    "one stage": (("", (0, 1)),),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_policies_suit_any_layout_and_schedule(layout, schedule):
    ranks = 1 + max(rank for _, group in layout for rank in group)
    graph, profile = blocks(16)
    plan = Plan(tuple(StagePlan(at, group) for at, group in layout), 6, schedule)

    def problem(memory: float) -> Problem:
        host = Host("a", (Device("x", int(memory)),) * ranks, inside=FAST, network=FAST, swap=Link(0.0, 1000.0))
        constraints = Constraints(memory_policies=frozenset({"recompute", "offload"}))
        return Problem(graph, profile, Cluster((host,)), 24, constraints=constraints)

    judged = Judge(problem(1e12)).judge(plan)
    state = judged.curves[0].state_bytes
    tight = problem(state + 0.8 * (max(judged.peak_bytes) - state))
    judge = Judge(tight)
    assert fit_by_policies(tight, judge.judge(plan), judge=judge).overflow(tight.cluster) <= 0


def test_stages_that_fit_keep_everything():
    problem, plan = asked("recompute", memory=PEAKS[1] + 1)
    _, found = fitted(problem, plan)
    assert [bool(stage.recompute) for stage in found.plan.stages] == [True, False, False, False]


def test_what_fits_is_left_alone():
    problem, plan = asked("recompute", memory=PEAKS[0])
    judged, found = fitted(problem, plan)
    assert found is judged


def test_nothing_is_given_up_that_is_not_allowed():
    problem, plan = asked("recompute", memory=0.5 * PEAKS[0], swap=Link(0.0, 1e12))
    _, found = fitted(problem, plan)
    assert not any(stage.offload for stage in found.plan.stages)
    problem, plan = asked("offload", memory=0.5 * PEAKS[0])  # no link to the host
    judged, found = fitted(problem, plan)
    assert found is judged


@pytest.mark.parametrize("part", [0.5, 0.8])
def test_at_most_one_tensor_too_many_is_recomputed(part):
    problem, plan = asked("recompute", memory=part * PEAKS[0], size=12)
    _, found = fitted(problem, plan)
    judge, plan = Judge(problem), found.plan
    for s, policy in enumerate(resolve_policies(found.plan, problem.graph, judge.pricer.works(found.cuts))):
        given_up, kept = set(policy.recomputed), 0
        for memory in policy.recomputed:
            names = tuple(problem.graph.tensors[m].name for m in sorted(given_up - {memory}))
            stages = list(plan.stages)
            stages[s] = replace(stages[s], recompute=names)
            fewer = replace(plan, stages=tuple(stages))
            if judge.judge(fewer).overflow(problem.cluster) <= 0:
                given_up, kept, plan = given_up - {memory}, kept + 1, fewer
        assert kept <= 1, f"stage {s} could keep {kept} tensors more"


def uneven(seed: int, count: int) -> tuple[Graph, Profile]:
    """Return a chain of linear layers of random times that save values of random size."""
    draw, sketch, times = random.Random(seed), Sketch(count, samples=4), []
    values = [sketch.batch(per_sample=100)]
    for k in range(count):
        more = {"parameters": (f"w_{k}",), "size": (draw.choice((100, 300, 1000, 3000)), 0)}
        values.append(sketch.forward(f"h_{k}", k, values[-1], **more))
        times.append(draw.choice((0.05, 0.3, 1.0, 2.0)))
    sketch.results.append(sketch.forward("loss", count - 1, values[-1], size=(0, 4)))
    gradient = sketch.backward("d_loss", count - 1, values[-1], size=(50, 0), reach=0)
    times += [CHEAP_S, CHEAP_S]
    for k in reversed(range(count)):
        sketch.gradients.append((sketch.gradient(f"w_{k}", k, gradient, values[k]), f"w_{k}"))
        gradient = sketch.backward(f"d_h_{k}", k, gradient, parameters=(f"w_{k}",), size=(50, 0), reach=0)
        times += [0.5, 0.5]
    return sketch.graph(), Profile("sketch", "sketch", (1, 2), tuple((seconds, 2 * seconds) for seconds in times))


def test_policies_fit_whenever_some_tensors_do_and_mostly_cost_the_least():
    ratios = []
    for seed, part in ((0, 0.5), (0, 0.7), (1, 0.7), (2, 0.7)):
        graph, profile = uneven(seed, 8)
        plan = Plan((StagePlan("", (0,)), StagePlan("n6", (1,))), 5, "1f1b", {"warmup": "4,1"})
        constraints = Constraints(memory_policies=frozenset({"recompute"}))
        free = Problem(
            graph, profile, Cluster((Host("a", (Device("x", 1 << 40),) * 2, FAST, FAST),)), 5, constraints=constraints
        )
        kept = Judge(free).judge(plan)
        state = kept.curves[0].state_bytes
        first = Device("x", int(state + part * (kept.peak_bytes[0] - state)))
        tight = replace(free, cluster=Cluster((Host("a", (first, Device("x", 1 << 40)), FAST, FAST),)))
        judge = Judge(tight)
        found = fit_by_policies(tight, judge.judge(plan), judge=judge)
        names = [f"h_{k}" for k in range(5)]
        every = [
            judge.judge(replace(plan, stages=(replace(plan.stages[0], recompute=some), plan.stages[1])))
            for count in range(6)
            for some in itertools.combinations(names, count)
        ]
        fitting = [judged.step_s for judged in every if judged.overflow(tight.cluster) <= 0]
        assert (found.overflow(tight.cluster) <= 0) == bool(fitting), (seed, part)
        if fitting:
            ratios.append((found.step_s - kept.step_s) / (min(fitting) - kept.step_s))
    assert len(ratios) >= 3 and sum(ratio < 1.001 for ratio in ratios) >= 0.75 * len(ratios), ratios
    assert max(ratios) < 2, ratios


def test_cheap_tensors_are_recomputed_first():
    problem, plan = asked("recompute", memory=0.75 * PEAKS[0])
    _, found = fitted(problem, plan)
    assert all("gelu" in place or "drop" in place for place in found.plan.stages[0].recompute), found.plan.stages[0]
    judge = Judge(problem)
    added = found.step_s - judge.judge(plan).step_s
    assert 0 < added < MICROBATCHES * 8 * 4 * CHEAP_S  # micro-batches x at most 8 cheap ones, on every stage


def test_recompute_falls_along_a_balanced_pipeline():
    for part in (0.45, 0.75):
        problem, plan = asked("recompute", memory=part * PEAKS[0])
        _, found = fitted(problem, plan)
        shares = share(problem, found)
        assert shares == sorted(shares, reverse=True) and shares[0] > shares[-1], (part, shares)


def test_free_copies_cost_no_time():
    problem, plan = deep("recompute", "offload", part=0.8, swap=Link(0.0, 4000.0))
    judged, found = fitted(problem, plan)
    assert found.plan.stages[0].offload and not found.plan.stages[0].recompute
    assert found.overflow(problem.cluster) <= 0
    assert found.step_s == pytest.approx(judged.step_s)


def test_slow_copies_leave_the_rest_to_recomputation():
    problem, plan = deep("recompute", "offload", part=0.6, swap=Link(0.0, 400.0))
    _, found = fitted(problem, plan)
    only, _ = deep("recompute", part=0.6, swap=NO_SWAP)
    _, recomputed = fitted(only, plan)
    assert found.overflow(problem.cluster) <= 0
    assert found.plan.stages[0].offload and found.plan.stages[0].recompute
    assert found.step_s <= recomputed.step_s


def test_two_lanes_make_the_free_time_of_capuchin():
    alone = [Stay(begin=0.0, asked=0.0, end=10.0)]
    assert free_copy_s(alone) == pytest.approx(5.0)  # end - begin - 2 x copy = 0
    stream = [Stay(float(m), asked=m + 2.0, end=m + 5.0) for m in range(50)]
    assert free_copy_s(stream) == pytest.approx(1.0, rel=0.1)  # one copy per direction and period
    assert absences(alone, 2.0)[0].end == 2.0  # back as soon as it is gone, since it was asked for already


def test_hundreds_of_tensors_are_ranked_at_once():
    graph, profile = blocks(300)
    work = Judge(Problem(graph, profile, Cluster((Host("a", (Device("x", 1),), FAST, FAST),)), 1)).pricer.works(())[0]
    terms = Terms(1, frozenset({"recompute"}), free_bytes=0.0, bytes_per_s=0.0, remade=1.0, offloaded=0.0)
    seconds = np.array(profile.seconds)[:, 0]
    found = choices(graph, work, seconds, terms)
    assert len(found) == 3 * 300  # all but the batch
    names = [graph.tensors[choice.memory].name for choice in found]
    assert all(name.startswith(("gelu", "drop")) for name in names[:600])
    assert all(name.startswith("linear") for name in names[600:])
