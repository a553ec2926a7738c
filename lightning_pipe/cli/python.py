"""Planning from Python: `lightning_pipe.plan` and `lightning_pipe.compare`, the commands of the same names.

    planned = lightning_pipe.plan("gpt-13b", cluster="a100_4x8_ethernet_100g", samples=64, planner="dapple")
    planned.step_s, planned.fits, planned.save("plan.yaml")

Both take the options of the command line (`lightning-pipe plan --help`) as arguments, with the same names, defaults and
errors, and make the same plans. A model may also be a LightningModule, or a function that returns one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_pipe.cli.options import CompareOptions, PlanOptions, PrecisionName, WishedOptions, options_of
from lightning_pipe.cli.problem import problem_of
from lightning_pipe.cli.tables import rank_table
from lightning_pipe.config import CostSource
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.serial import save_yaml
from lightning_pipe.errors import ConfigError, PipeError
from lightning_pipe.lightning_package import choose, package_of
from lightning_pipe.planner.comparison.alternatives import alternatives, chosen_options
from lightning_pipe.planner.comparison.pages import page_of, stages_table
from lightning_pipe.planner.evaluation.evaluate import Judged
from lightning_pipe.planner.problem import Problem, Sharding
from lightning_pipe.planner.registry import PLANNER_NAMES, PlannerName, propose
from lightning_pipe.report import explain, html_page
from lightning_pipe.schedule.registry import ScheduleName

if TYPE_CHECKING:
    from lightning_pipe.lightning_names import pl

Wished = TypeVar("Wished", bound=WishedOptions)


@dataclass(frozen=True)
class PlannedStep:
    """A plan, and what is predicted of a step that is run by it.

    Attributes:
        problem: what it was made for: graph, costs, devices and samples.
        judged: the plan as the simulator sees it.
        others: the other candidates of the planner, best first.
    """

    problem: Problem
    judged: Judged
    others: tuple[Judged, ...] = ()

    @property
    def plan(self) -> Plan:
        """Return the plan; `DappleStrategy(plan=...)` takes the file that `save` writes."""
        return self.judged.plan

    @property
    def step_s(self) -> float:
        """Return the predicted seconds of an optimizer step."""
        return self.judged.step_s

    @property
    def bubble(self) -> float:
        """Return the share of their time in which ranks wait, as a mean over ranks."""
        return self.judged.bubble

    @property
    def memory(self) -> tuple[int, ...]:
        """Return the predicted peak of every rank, in bytes."""
        return self.judged.peak_bytes

    @property
    def fits(self) -> bool:
        """Return whether every rank stays below its limit."""
        return self.judged.overflow(self.problem.cluster) <= 0

    @property
    def tokens_per_s(self) -> float | None:
        """Return the tokens per second over all ranks; None where samples have no tokens."""
        return self.problem.samples * self.problem.tokens / self.step_s if self.problem.tokens else None

    @cached_property
    def reasons(self) -> str:
        """Return what speaks for and against the plan, with its alternatives as a table."""
        ways, chosen = alternatives(self.problem, self.judged, self.others), chosen_options(self.problem.constraints)
        return explain(ways, timeline=self.judged.timeline, chosen=chosen)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan to a file (YAML)."""
        save_yaml(self.plan, fspath(path))

    def report(self, path: str | PathLike[str]) -> None:
        """Write the plan, its predicted timeline, memory and alternatives as one HTML page."""
        page = page_of(self.problem, self.judged, self.others)
        Path(path).write_text(html_page(page), encoding="utf-8")

    def __str__(self) -> str:
        """Return the tables that `lightning-pipe plan` prints."""
        return f"{stages_table(self.judged, self.problem)}\n\n{rank_table(self.judged, self.problem)}"


def plan(
    model: str | pl.LightningModule | Callable[[], pl.LightningModule] | None = None,
    *,
    planner: PlannerName = "auto",
    schedule: ScheduleName | str | PathLike[str] | None = None,
    cluster: str | PathLike[str] | None = None,
    ranks: int | None = None,
    samples: int | None = None,
    batch: Any = None,
    precision: PrecisionName = "32-true",
    costs: CostSource = "counted",
    shard_optimizer: Sharding = "auto",
    **options: Any,
) -> PlannedStep:
    """Plan a step for devices that need not be at hand; nothing is trained.

    Args:
        model: what is trained: a module, a function that returns one, "package.module:name", or "gpt-13b" and the like;
            None if `profile=` names a published profile.
        planner: who plans; "auto" asks all, and takes what the simulator finds best.
        schedule: order of the passes, or a CSV file of one; by default the planner chooses.
        cluster: devices: preset or file of a cluster.
        ranks: instead of a cluster, the number of equal nominal devices.
        samples: of an optimizer step, over all ranks; by default those of the batch.
        batch: a batch, or "package.module:name" of a function that returns one; by default the model's own.
        precision: numeric precision, as of the Trainer.
        costs: cost of the model's operations: counted, or measured on this machine.
        shard_optimizer: whether replicas shard the optimizer state; "auto" shards only if no plan fits otherwise.
        options: further options of `lightning-pipe plan`.

    Raises:
        ConfigError: if an option is unknown or out of range, or the model cannot be built.
        CaptureError: if the step cannot be captured.
        PlanError: if no plan fits.
    """
    given = {**options, "planner": planner, "cluster": cluster, "ranks": ranks, "samples": samples, "out": None}
    given |= {"schedule": schedule, "precision": precision, "costs": costs, "shard_optimizer": shard_optimizer}
    _, problem = _problem(PlanOptions, model, batch, given)
    best, *others = propose(problem, planner)
    return PlannedStep(problem, best, tuple(others))


def compare(
    model: str | pl.LightningModule | Callable[[], pl.LightningModule] | None = None,
    *,
    planners: Sequence[PlannerName] | None = None,
    schedule: ScheduleName | str | PathLike[str] | None = None,
    batch: Any = None,
    precision: PrecisionName = "32-true",
    costs: CostSource = "counted",
    shard_optimizer: Sharding = "auto",
    **options: Any,
) -> dict[str, PlannedStep | PipeError]:
    """Let several planners plan the same step; return the plan of each, or why it has none, by planner.

    With `versions="all"`, or names of policies of weight versions, one planner plans for each of them and for `sync`:
    the result is by policy.

    Args:
        model: as for `plan`.
        planners: who plans; by default all but "exhaustive".
        schedule: as for `plan`.
        batch: as for `plan`.
        precision: as for `plan`.
        costs: as for `plan`.
        shard_optimizer: as for `plan`.
        options: further options, as for `plan`.

    Raises:
        ConfigError, CaptureError: as of `plan`.
    """
    given = {**options, "schedule": schedule, "precision": precision, "costs": costs}
    given |= {"shard_optimizer": shard_optimizer} | ({} if planners is None else {"planners": tuple(planners)})
    wanted, problem = _problem(CompareOptions, model, batch, given)
    found = dict[str, PlannedStep | PipeError]()
    asked: list[tuple[str, str, Problem]] = [(name, name, problem) for name in planners or PLANNER_NAMES[:-1]]
    if wanted.policies:
        asked = [(name, wanted.planner, problem.with_versions(name)) for name in ("sync", *wanted.policies)]
    for name, planner, one in asked:
        try:
            best, *others = propose(one, planner)
            found[name] = PlannedStep(one, best, tuple(others))
        except PipeError as error:
            found[name] = error
    return found


def _problem(kind: type[Wished], model: Any, batch: Any, options: dict[str, Any]) -> tuple[Wished, Problem]:
    """Return the checked options, and the problem of a model, or of what the options name."""
    for name, value in options.items():
        if isinstance(value, PathLike):
            options[name] = fspath(value)
    is_named = model is None or isinstance(model, str)
    if isinstance(batch, str):
        options, batch = {**options, "batch": batch}, None
    name = model if is_named else getattr(model, "__qualname__", type(model).__name__)
    found = options_of(kind, {**options, "model": name})
    if is_named:
        return found, problem_of(found, batch=batch)
    if not callable(model):  # as a module is
        raise ConfigError(f"found model={model!r}; expected a LightningModule, a function that returns one, or a name")
    if (package := package_of(model if isinstance(model, type) else type(model))) is not None:
        choose(package)
    return found, problem_of(found, model=model, batch=batch)
