"""Planning on rank 0: the plan is the user's file or the planner's choice, and is sent to all ranks.

Also here: how a plan meets graphs other than the one that it was made for (validation, other shapes).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from lightning_pipe.config import DappleConfig, conf_dir
from lightning_pipe.core.cluster import Cluster
from lightning_pipe.core.cluster_file import check_ranks, find_cluster
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.policy import ActivationPolicy
from lightning_pipe.core.serial import load_yaml
from lightning_pipe.errors import BatchError, PlanError
from lightning_pipe.planner.evaluation.copies import offloading_in_vain
from lightning_pipe.planner.evaluation.evaluate import Judged, judge
from lightning_pipe.planner.evaluation.heads import needs_forwards_first
from lightning_pipe.planner.evaluation.resolve import check_weights, transfer_cuts
from lightning_pipe.planner.memory.policies import keeps_everything, known_places, policies_of
from lightning_pipe.planner.memory.settle import shortage
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.registry import propose as planned
from lightning_pipe.report.table import head_sentence
from lightning_pipe.schedule.registry import planned_join


def given_plan(config: DappleConfig) -> Plan | None:
    """Read the user's plan, if there is one.

    Raises:
        PlanError: if the file cannot be read, or has weights that do not fit its ranks.
    """
    if config.plan is None:
        return None
    plan = load_yaml(Plan, config.plan)
    check_weights(plan)
    return plan


def given_cluster(config: DappleConfig, ranks: int) -> Cluster | None:
    """Read the user's cluster, if there is one.

    Raises:
        ClusterError: if there is no such file or preset, it cannot be read, or has another number of devices.
    """
    if config.cluster is None:
        return None
    cluster = find_cluster(config.cluster, presets=conf_dir() / "cluster")
    check_ranks(cluster, ranks, source=config.cluster)
    return cluster


@dataclass(frozen=True)
class Planned:
    """What rank 0 knows of the plan.

    Attributes:
        plan: the plan.
        cuts: its cuts.
        problem: what it was made for.
        judged: the plan as judged, then the planner's other candidates, best first.
        route: by which route the step was captured, and why.
        wanted: the options that it keeps to.
        may_offload: whether what is saved can be brought to the host.
        chosen: names of the options that the user has set, of those that decide the form of a plan.
        whole: why batches are not cut, in words after "since"; "" if they may be.
        is_disturbed: whether other work took a part of the processor while operations were timed.
    """

    plan: Plan
    cuts: tuple[int, ...]
    problem: Problem
    judged: tuple[Judged, ...]
    route: str
    wanted: DappleConfig
    may_offload: bool
    chosen: frozenset[str] = frozenset()
    whole: str = ""
    is_disturbed: bool = False


_NO_WARMUP = "So all forwards come before the backwards, and `warmup` is not used."


def propose(problem: Problem, config: DappleConfig, *, given: Plan | None, may_offload: bool = True) -> list[Judged]:
    """Judge the given plan, or let the planner that the configuration names make some; its choice comes first.

    Args:
        problem: what is planned for.
        config: options.
        given: the user's plan, if there is one.
        may_offload: whether what is saved can be brought to the host.

    Raises:
        PlanError: if a step is to offload what cannot be, the plan or the layout does not fit, the graph is too
            small, or no plan fits into memory.
    """
    if given is not None:
        if not may_offload and any(stage.offload for stage in given.stages):
            raise PlanError(
                f"The plan {config.plan} has stages that offload, but this step is replayed, and what its modules save "
                "stays on the device. Put `recompute:` with the paths of modules in the place of `offload:`."
            )
        judged = judge(given, problem)
        warn_of_overflow(problem, judged)
        warn_of_what_stays(judged)
        return [judged]
    constraints = replace(config.constraints, versions=problem.constraints.versions)
    if not may_offload:
        constraints = replace(constraints, memory_policies=constraints.memory_policies - {"offload"})
    if config.warmup is not None and config.schedule is None and needs_forwards_first(problem):
        warnings.warn(f"{head_sentence(problem.graph, problem.samples)} {_NO_WARMUP}", stacklevel=2)
        constraints = replace(constraints, schedule=None, warmup=None)
    found = planned(replace(problem, constraints=constraints), config.planner)
    return [one for one in found if not config.exact_ties or planned_join(one.plan) == 1]  # which adds in its own order


def warn_of_overflow(problem: Problem, judged: Judged) -> None:
    """Warn that the user's own plan does not fit into memory; it may run all the same, as predictions are not exact."""
    if judged.overflow(problem.cluster) > 0:
        text = f"The given plan is run although it does not fit into memory: it {shortage(problem, judged)}"
        warnings.warn(text, stacklevel=2)


def warn_of_what_stays(judged: Judged) -> None:
    """Warn of stages of the user's own plan that offload, of which nothing leaves."""
    if staying := offloading_in_vain(judged.plan, judged.program):
        warnings.warn(
            f"The given plan offloads in stage {', '.join(map(str, staying))}, which keeps everything: each micro-"
            "batch would have to be fetched before its memory is given up. Recompute there instead, or take a schedule "
            "that warms up with more micro-batches.",
            stacklevel=2,
        )


def in_turns(plan: Plan) -> Plan:
    """Return a plan whose replicas take whole micro-batches in turn.

    The Python of a replayed step runs in several stages, and may do with the samples what it wants (mix them, read
    a mean of them), so all stages must see the same ones.
    """
    stages = tuple(
        replace(stage, share="microbatches", weights=()) if len(stage.ranks) > 1 else stage for stage in plan.stages
    )
    return replace(plan, stages=stages)


def check_samples(microbatches: int, samples: int) -> None:
    """Check that the first batch can be cut into the wanted micro-batches.

    Raises:
        BatchError: if it has fewer samples.
    """
    if samples < microbatches:
        raise BatchError(
            f"The first batch has {samples} samples, but {microbatches} micro-batches are wanted. Set "
            f"microbatches to at most {samples}, or increase the batch size."
        )


def cut_other(graph: Graph, *, planned: Graph, cuts: tuple[int, ...]) -> tuple[int, ...]:
    """Cut another graph of the module where its state allows; stages find parameters that they hold where possible.

    Args:
        graph: the graph to be cut; some stages may have no work in it.
        planned: the graph that was cut by the plan.
        cuts: its cuts.
    """
    found = transfer_cuts(planned, cuts, graph).cuts
    from lightning_pipe.capture.stages.assign import moved  # needs torch, which plans of published profiles do not

    starts = [0, *moved(found, count=len(graph.nodes), forbidden=graph.uncuttable)]
    ends = [*starts[1:], len(graph.nodes)]
    working = next((s for s, (start, end) in enumerate(zip(starts, ends, strict=True)) if start < end), 0)
    starts[1 : working + 1] = [ends[working]] * working  # batches are loaded by stage 0, so it always has work
    return tuple(starts[1:])


def policies_for(
    plan: Plan, graph: Graph, cuts: tuple[int, ...], *, planned: Graph, may_offload: bool = True
) -> tuple[tuple[ActivationPolicy, ...], str]:
    """Return the activation policy of every stage, and what of the plan's is not followed; "" if all is.

    Args:
        plan: the plan.
        graph: the graph that is cut: that of the plan, or another of the module (other shapes, another branch).
        cuts: its cuts.
        planned: the graph that the plan was made for.
        may_offload: whether what is saved can be brought to the host.

    Raises:
        PlanError: if the graph is that of the plan, and a place in it is wrong.
    """
    if not graph.gradients or keeps_everything(plan, graph):
        return (), ""
    known, missing = (plan, ()) if graph.fingerprint == planned.fingerprint else known_places(plan, graph, cuts)
    if not may_offload:
        missing = tuple(dict.fromkeys((*missing, *(place for stage in known.stages for place in stage.offload))))
        known = replace(known, stages=tuple(replace(stage, offload=()) for stage in known.stages))
    return policies_of(known, graph, cuts), ", ".join(missing)
