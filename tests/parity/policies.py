"""Run plans that recompute and offload on the local transport, and compare with the same plan that keeps all."""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import dataclass, replace

import torch

from lightning_pipe.capture import flatten
from lightning_pipe.core.cluster import limited
from lightning_pipe.core.plan import Plan, microbatch_sizes
from lightning_pipe.core.program import Compute, Evict, Fetch, Free, Joined, Send, Vacate, VerifiedProgram
from lightning_pipe.cost.activations import candidates
from lightning_pipe.cost.stage import Cutter
from lightning_pipe.planner.evaluation.evaluate import Judged, judge
from lightning_pipe.planner.evaluation.resolve import places_of
from lightning_pipe.planner.memory.policies import policies_of
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.runtime.executor import Executor, run_together
from lightning_pipe.runtime.job import BatchInput
from lightning_pipe.runtime.stage import State
from lightning_pipe.runtime.transport.local import Hub
from models.parity import make_module
from parity.training import BATCH, CPU, SEED, captured, loader, problem_of


@dataclass
class Ran:
    """What one step left on all ranks: losses, gradients, buffers, and bytes kept after every instruction."""

    losses: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    buffers: list[dict[str, torch.Tensor]]
    saved: list[list[int]]


def swapping_problem(name: str, *, layout: str, schedule: str, microbatches: int, dropout: float) -> Problem:
    """Return a problem on hosts that tensors can be offloaded to."""
    replicas = tuple(int(n) for n in layout.split("-"))
    constraints = Constraints(microbatches, replicas, schedule, "pa" if schedule == "1f1b" else None)
    problem = problem_of(name, ranks=sum(replicas), constraints=constraints, dropout=dropout)
    hosts = tuple(replace(host, swap=host.inside) for host in problem.cluster.hosts)
    return replace(problem, cluster=replace(problem.cluster, hosts=hosts))


def plan_of(problem: Problem, join: int = 1) -> Plan:
    """Return the plan that keeps all."""
    plan = propose(problem, "uniform")[0].plan
    return replace(plan, options={**plan.options, "join": join}) if join > 1 else plan


def tight(problem: Problem, *, share: float) -> Problem:
    """Return a problem whose devices have this share of what keeping all takes beside the state; plans may offload."""
    judged = propose(problem, "uniform")[0]
    states = [curve.state_bytes for curve in judged.curves]
    needs = (round(state + share * (peak - state)) for state, peak in zip(states, judged.peak_bytes, strict=True))
    constraints = replace(problem.constraints, memory_policies=frozenset({"offload"}))
    return replace(problem, cluster=limited(problem.cluster, {"": max(needs)}), constraints=constraints)


def mixed(plan: Plan, problem: Problem, *, recompute: float, offload: float, seed: str) -> Plan:
    """Return a plan whose stages recompute and offload shares of what they save, drawn at random, and await copies."""
    graph, dice = problem.graph, random.Random(seed)
    works = Cutter(graph).works(judge(plan, problem).cuts)
    stages = []
    for stage, work in zip(plan.stages, works, strict=True):
        found = candidates(graph, work)
        can = [c.memory for c in found if c.is_remakeable]
        again = dice.sample(can, round(recompute * len(can)))
        rest = [c.memory for c in found if c.memory not in again]
        away = dice.sample(rest, round(offload * len(rest)))
        given_up = {"recompute": places_of(graph, work, again), "offload": places_of(graph, work, away)}
        stages.append(replace(stage, beside_copy=0, **given_up))
    return replace(plan, stages=tuple(stages))


def run(judged: Judged, name: str, problem: Problem, *, dropout: float) -> Ran:
    """Run one step of a judged plan."""
    capture, layout, microbatches = captured(name, dropout), judged.plan.layout, judged.plan.microbatches
    policies = policies_of(judged.plan, capture.graph, judged.cuts)
    split, hub = capture.split(judged.cuts, policies=policies, exact_ties=False), Hub()
    modules = [make_module(name, dropout=dropout).train() for _ in range(layout.ranks)]
    states = [State(dict(m.named_parameters(remove_duplicate=False)), dict(m.named_buffers()), CPU) for m in modules]
    executors = [
        Executor(split, layout, state=s, transport=hub.endpoint(r), loss=capture.record.loss)
        for r, s in enumerate(states)
    ]
    tensors, structure = flatten(loader(name)[0])
    sizes = microbatch_sizes(BATCH, microbatches)
    leaves, cut = capture.with_totals(tensors, cut=structure.cut(), sizes=sizes, buffers=states[0].buffers)
    job = BatchInput(leaves, cut, tuple(itertools.accumulate((0, *sizes[:-1]))), seed=SEED)
    outcomes = run_together(executors, judged.program, [job] * layout.ranks, record_memory=True)
    pieces = {(p.microbatch, p.samples): p for o in outcomes for p in o.results.get(capture.record.loss, ())}
    return Ran(
        [piece.content for _, piece in sorted(pieces.items())],
        [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in modules],
        [copy.deepcopy(dict(m.named_buffers())) for m in modules],
        [[held for _, held in outcome.memory] for outcome in outcomes],
    )


def expected_bytes(judged: Judged) -> list[list[int]]:
    """Return what each rank keeps after every instruction that changes it, by the prices alone."""
    return [list(_walk(judged.program, judged, rank)) for rank in range(len(judged.program.ranks))]


def _walk(program: VerifiedProgram, judged: Judged, rank: int):
    prices, held = judged.prices, 0

    def samples(stage: int, m: int) -> int:
        replica = program.layout.stages[stage].index(rank)
        return len(program.layout.samples(stage, replica, m, program.sizes[m]))

    waiting: dict[tuple[int, int], int] = {}  # what is kept for W
    for x in program.ranks[rank]:
        match x:
            case Compute(stage, kind, m):
                n = samples(stage, m)
                if kind == "F":
                    held += prices.saved_bytes(stage, n)
                elif kind == "I":
                    waiting[stage, m] = prices.kept_bytes(stage, n)
                    held += waiting[stage, m] - prices.saved_bytes(stage, n)
                elif kind == "W":
                    held -= waiting.pop((stage, m))
            case Joined(stage, ms):
                held -= sum(waiting.pop((stage, m)) for m in ms)
            case Evict():
                pass
            case Vacate(stage, m):
                held -= prices.offloaded_bytes(stage, samples(stage, m))
            case Fetch(stage, m):
                held += prices.offloaded_bytes(stage, samples(stage, m))
            case Free() | Send():
                pass
            case _:
                continue
        yield held


def check_saved(ran: Ran, judged: Judged) -> None:
    """Check what is kept after every instruction; of what one stage hands to another of its rank there is one copy."""
    stages = judged.plan.layout.stages
    for rank, (found, expected) in enumerate(zip(ran.saved, expected_bytes(judged), strict=True)):
        shares = any(set(a) & set(b) & {rank} for a, b in itertools.pairwise(stages))
        assert found == expected or (shares and all(a <= b for a, b in zip(found, expected, strict=True))), rank


def check_same(one: Ran, two: Ran, *, tolerance: float = 0.0) -> None:
    """Check that two runs made the same numbers."""
    torch.testing.assert_close(one.losses, two.losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(one.gradients, two.gradients, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(one.buffers, two.buffers, rtol=0, atol=0)
