"""The activation policy of every stage of a plan, as names that stage programs are made from (`core.policy`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import Plan, keeps_all
from lightning_pipe.core.policy import KEEP_ALL, ActivationPolicy, RecomputingBackward
from lightning_pipe.cost.activations import KEEP, Memories, StagePolicy, with_policy
from lightning_pipe.cost.stage import Cutter, StageWork
from lightning_pipe.cost.tables import GraphArrays
from lightning_pipe.planner.evaluation.resolve import places_followed, resolve_policies


def policies_of(plan: Plan, graph: Graph, cuts: Sequence[int]) -> tuple[ActivationPolicy, ...]:
    """Return the policy of every stage.

    Args:
        plan: with the places that its stages do not keep.
        graph: the graph that the plan was made for.
        cuts: positions at which stages 1, 2, ... begin.

    Raises:
        PlanError: if a place is unknown, saves nothing in its stage, or cannot be recomputed.
    """
    if keeps_everything(plan, graph):
        return (KEEP_ALL,) * len(plan.stages)
    cutter = Cutter(graph)
    works = cutter.works(cuts)
    policies = resolve_policies(plan, graph, works)
    return tuple(policy_of(cutter.tables, work, policy) for work, policy in zip(works, policies, strict=True))


def keeps_everything(plan: Plan, graph: Graph) -> bool:
    """Return whether nothing that is saved is given up, by the plan or by checkpoints in the module."""
    is_plain = plan.ignore_checkpoints or not graph.has_checkpoints
    return is_plain and all(keeps_all(stage) for stage in plan.stages)


def known_places(plan: Plan, graph: Graph, cuts: Sequence[int]) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with those places only that can be followed in another graph of the module, and the others.

    Args:
        plan: made for a graph of the same module.
        graph: the other graph, with gradients.
        cuts: its cuts.
    """
    works = Cutter(graph).works(cuts)
    stages, missing = [], dict[str, None]()
    for stage, work in zip(plan.stages, works, strict=True):
        again, offload = (
            places_followed(graph, work, places, again=again)
            for places, again in ((stage.recompute, True), (stage.offload, False))
        )
        stages.append(replace(stage, recompute=again, offload=offload))
        missing.update(dict.fromkeys({*stage.recompute, *stage.offload}.difference(again, offload)))
    return replace(plan, stages=tuple(stages)), tuple(sorted(missing))


def policy_of(tables: GraphArrays, work: StageWork, policy: StagePolicy) -> ActivationPolicy:
    """Return the policy of one stage.

    Args:
        tables: of the graph.
        work: the stage when all is kept.
        policy: what it does not keep.
    """
    if policy == KEEP:
        return KEEP_ALL
    less, memories = with_policy(tables, work, policy), Memories(tables.graph, work)
    names = tables.graph.tensors
    leaving = policy.offloaded.intersection(less.saved)
    offloaded = tuple(tensor.name for t, tensor in enumerate(names) if memories.of(t) in leaving)
    return ActivationPolicy(_backward(tables, less, memories, policy.recomputed), offloaded)


def _backward(
    tables: GraphArrays, less: StageWork, memories: Memories, recomputed: frozenset[int]
) -> RecomputingBackward | None:
    if not recomputed:
        return None
    graph, kept = tables.graph, memories.there - recomputed
    early, late = ([graph.operations[o].name for o in h.operations] for h in (less.input_grad, less.weight_grad))
    again = memories.forward.intersection(less.input_grad.operations)
    made = {graph.tensors[t].name for o in again for t in tables.makes[o] if memories.of(t) not in kept}
    return RecomputingBackward(tuple(early), tuple(late), frozenset(made))
