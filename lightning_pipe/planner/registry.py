"""Registry of planners: their names, and how a name becomes plans.

judged = propose(problem, "auto")
judged[0].plan
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from lightning_pipe.collection import without_collection
from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.foreign_names import expected_names
from lightning_pipe.planner.candidates.microbatch_share import shared_counts
from lightning_pipe.planner.evaluation.evaluate import Judge, Judged
from lightning_pipe.planner.evaluation.heads import check_constraints, with_forwards_first
from lightning_pipe.planner.memory.least_memory import LeastMemory
from lightning_pipe.planner.memory.settle import check_fits, settle
from lightning_pipe.planner.portfolio.auto import Planner, auto
from lightning_pipe.planner.portfolio.exhaustive import exhaustive
from lightning_pipe.planner.portfolio.round_plans import round_plans
from lightning_pipe.planner.portfolio.schedule_candidates import (
    OUTLINED,
    ScheduleCandidates,
    asks_for_drafts,
    judged_drafts,
)
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.systems.bapipe import bapipe
from lightning_pipe.planner.systems.dapple.dapple_planner import dapple
from lightning_pipe.planner.systems.dawnpiper import dawnpiper
from lightning_pipe.planner.systems.madpipe.madpipe_planner import madpipe
from lightning_pipe.planner.systems.pipedream import pipedream
from lightning_pipe.planner.systems.spp.spp_planner import spp
from lightning_pipe.planner.systems.uniform import uniform

PLANNERS: dict[str, Planner] = {
    "dapple": dapple,
    "spp": spp,
    "madpipe": madpipe,
    "dawnpiper": dawnpiper,
    "pipedream": pipedream,
    "bapipe": bapipe,
    "uniform": uniform,
}
PlannerName = Literal["auto", "dapple", "spp", "madpipe", "dawnpiper", "pipedream", "bapipe", "uniform", "exhaustive"]
PLANNER_NAMES: tuple[PlannerName, ...] = get_args(PlannerName)
FOLLOW_LAYOUTS = ("auto", "uniform", "exhaustive")  # planners that keep to a layout of the user's


def propose(problem: Problem, planner: str) -> list[Judged]:
    """Return plans, the planner's choice first.

    Args:
        problem: what is planned.
        planner: one of `PLANNER_NAMES`.

    Raises:
        ConfigError: if there is no such planner, or it does not keep to a layout and one is given, or the schedule
            mixes forwards and backwards although the step has a head.
        PlanError: if no plan fits: into memory, or the graph.
    """
    if planner not in PLANNER_NAMES:
        raise ConfigError(f"found planner={planner!r}; {expected_names(planner, PLANNER_NAMES)}")
    wished = problem.constraints.replicas
    if wished is not None and planner not in FOLLOW_LAYOUTS:
        layout = "-".join(map(str, wished))
        raise ConfigError(
            f"planner={planner!r} decides the layout, but layout={layout!r} is set. Remove the layout, or use one of "
            f"the planners {', '.join(FOLLOW_LAYOUTS)}."
        )
    if wished is not None:
        check_layout(wished, problem.cluster.ranks)
    check_constraints(problem)
    with without_collection():  # plans have no cycles, and are many objects
        return _shared(problem, planner)


def _shared(problem: Problem, planner: str) -> list[Judged]:
    """Return plans that fit; where micro-batches change what is trained, with the first number of them that does."""
    refusal: PlanError | None = None
    for count in shared_counts(problem) or (problem.constraints.microbatches,):
        asked = replace(problem, constraints=replace(problem.constraints, microbatches=count))
        try:
            found = _proposed(asked, planner)
            check_fits(asked, found)
        except PlanError as error:
            refusal = refusal or error
        else:
            return found
    assert refusal is not None, "one number at least was planned with"
    raise refusal


def check_layout(replicas: Sequence[int], ranks: int) -> None:
    """Refuse a layout that has not as many ranks as the trainer.

    Raises:
        PlanError: with both numbers.
    """
    if sum(replicas) != ranks:
        raise PlanError(
            f"layout={'-'.join(map(str, replicas))!r} asks for {sum(replicas)} ranks, the trainer has {ranks}. Change "
            "`layout` or `devices` (times `num_nodes`)."
        )


def _proposed(problem: Problem, planner: str) -> list[Judged]:
    """Return the plans of outlines, of drafts, or of both, as the constraints ask for."""
    if problem.policy is not None:
        return _in_rounds(problem, planner)
    judge = Judge(problem)
    if problem.constraints.order:
        drafts = [judge.judge(draft.plan(problem)) for draft in ScheduleCandidates(problem).given()]
        return sorted(drafts, key=lambda one: one.rank(problem.cluster))
    asked = problem
    if asks_for_drafts(problem):
        schedule = problem.constraints.schedule if problem.constraints.schedule in OUTLINED else None
        asked = replace(problem, constraints=replace(problem.constraints, schedule=schedule, stages_per_device=None))
    is_for_drafts, asked = asked is not problem, with_forwards_first(asked)
    least = LeastMemory(asked) if planner == "auto" else None
    if least is not None and not least.may_fit():
        return settle(asked, least.nearest(), judge=judge)
    if least is not None and not least.row_may_fit():
        found = settle(asked, least.nearest(), judge=judge)
    else:
        found = _outlined(asked, planner)
    if is_for_drafts:
        return judged_drafts(problem, found, judge=judge)
    constraints = problem.constraints
    if planner == "auto" and problem.training and constraints.schedule is None and constraints.warmup is None:
        found = sorted([*found, *judged_drafts(problem, found, judge=judge)], key=lambda one: one.rank(problem.cluster))
    return found


def _in_rounds(problem: Problem, planner: str) -> list[Judged]:
    """Return plans of pipelines that are never flushed."""
    constraints = problem.constraints
    asked = replace(constraints, memory_policies=constraints.memory_policies - {"offload"})
    problem = replace(problem, constraints=replace(asked, schedule=constraints.schedule or "1f1b"))
    match planner:
        case "auto" if constraints.replicas is not None:
            return round_plans(problem, {"uniform": uniform}, searches=True)
        case "auto":
            return round_plans(problem, PLANNERS, searches=True)
        case "exhaustive":
            raise PlanError(
                f"planner='exhaustive' looks for pipelines that are flushed, but versions={constraints.versions!r} is "
                "set. Use planner='auto', or versions='sync'."
            )
        case _:
            return round_plans(problem, {planner: PLANNERS[planner]}, searches=False)


def _outlined(problem: Problem, planner: str) -> list[Judged]:
    """Return the plans of outlines: 1F1B, which gains nothing if ranks run ahead, so they are looked for as if not."""
    if problem.runs_ahead:
        judge = Judge(problem)
        return [judge.judge(one.plan) for one in _outlined(replace(problem, runs_ahead=False), planner)]
    match planner:
        case "auto" if problem.constraints.replicas is not None:
            return auto(problem, {"uniform": uniform})
        case "auto":
            return auto(problem, PLANNERS)
        case "exhaustive":
            return exhaustive(problem)
        case _:
            return settle(problem, PLANNERS[planner](problem), judge=Judge(problem))
