"""Plans of steps with a head: all forwards of a batch come before its backwards, which few schedules do.

A head (`core.graph.HeadWork`) runs once per batch and needs all samples. Whether an order has all forwards first is
asked of the order itself, whoever made it (`schedule.rules.is_forwards_first`).
"""

from __future__ import annotations

from dataclasses import replace

from lightning_pipe.core.program import CopyingOrder
from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.planner.problem import Problem
from lightning_pipe.report.table import head_sentence
from lightning_pipe.schedule.registry import SCHEDULES, Schedule, options_with_forwards_first, order_of
from lightning_pipe.schedule.rules import is_forwards_first

_PER_STAGE = 2  # micro-batches per rank for which an order is asked where their number is open


def needs_forwards_first(problem: Problem) -> bool:
    """Return whether backwards of the step wait for all forwards."""
    head = problem.graph.head
    return problem.training and head is not None and head.holds_backwards


def check_order(order: CopyingOrder, problem: Problem, *, schedule: str) -> None:
    """Check that an order runs all forwards first, where the step needs that.

    Raises:
        ConfigError: naming the line of the step, and the ways out.
    """
    if needs_forwards_first(problem) and not is_forwards_first(order):
        raise ConfigError(
            f"{head_sentence(problem.graph, problem.samples)} So all forwards come before the backwards, but found "
            f"schedule={schedule!r}, which mixes them. Use schedule='gpipe', or 'breadth_first' for several stages per "
            "device; or whole_batch='by_microbatch', which takes gradients as accumulation does."
        )


def check_constraints(problem: Problem) -> None:
    """Check that what the user has decided can run the head of the step, before anything is planned.

    Raises:
        ConfigError: if the schedule mixes forwards and backwards.
        PlanError: if batches are to overlap.
    """
    constraints = problem.constraints
    if problem.policy is not None and problem.graph.head is not None:
        raise PlanError(
            f"{head_sentence(problem.graph, problem.samples)} But versions={constraints.versions!r} runs forwards of "
            "the next batch before the backwards of this one. Use versions='sync', or whole_batch='by_microbatch'."
        )
    name = constraints.schedule or ("1f1b" if constraints.warmup is not None else "gpipe")
    schedule = SCHEDULES.get(name)
    if not needs_forwards_first(problem) or not isinstance(schedule, Schedule):
        return
    count = constraints.microbatches or _PER_STAGE * problem.cluster.ranks
    try:
        layout = schedule.layout([(rank,) for rank in range(problem.cluster.ranks)], constraints.stages_per_device)
        options = options_with_forwards_first(name)
        order = order_of(name, layout=layout, microbatches=count, options=options)
    except ConfigError:
        return  # it does not suit single devices; the judge asks the order that is made
    check_order(order, problem, schedule=name)


def with_forwards_first(problem: Problem) -> Problem:
    """Return the problem whose outlines run all forwards first, where the step needs that and no schedule is set."""
    constraints = problem.constraints
    if constraints.schedule is not None or not needs_forwards_first(problem):
        return problem
    return replace(problem, constraints=replace(constraints, schedule="gpipe"))
