"""Commands of the command line. Each plans or evaluates, and returns its output piece by piece."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_pipe.cli.options import (
    CompareOptions,
    Drawn,
    ExplainOptions,
    PlanOptions,
    ReportOptions,
    SimulateOptions,
    StepOptions,
    WishedOptions,
)
from lightning_pipe.cli.problem import overhead_sentence, problem_of
from lightning_pipe.cli.rounds import notes_of
from lightning_pipe.cli.tables import Attempt, attempts_table, policies_table, rank_table
from lightning_pipe.core.plan import Plan
from lightning_pipe.core.serial import load_yaml, save_yaml
from lightning_pipe.errors import ConfigError, PipeError, PlanError
from lightning_pipe.planner.comparison.alternatives import alternatives, chosen_options, difference_of, larger_batch
from lightning_pipe.planner.comparison.pages import page_of, stages_table
from lightning_pipe.planner.evaluation.evaluate import Judged, judge, unfolded
from lightning_pipe.planner.evaluation.resolve import check_weights
from lightning_pipe.planner.problem import Problem
from lightning_pipe.planner.registry import propose
from lightning_pipe.report import chrome_trace, explain, html_page, plot_memory, plot_timeline
from lightning_pipe.report.table import WIDTH, wrapped
from lightning_pipe.strategy.plans.planning import check_samples
from lightning_pipe.units import format_bytes, format_seconds, format_share


@dataclass(frozen=True)
class _Planned:
    """A plan, what it was made for, and the other candidates of its planner, best first."""

    problem: Problem
    best: Judged
    others: Sequence[Judged]
    seconds: float


def run_plan(options: PlanOptions, width: int) -> Iterator[str]:
    """Make a plan, write it, and yield its tables and why it was chosen."""
    width = min(width, WIDTH)
    planned = _planned(options, options.planner)
    yield from _tables(planned.best, planned.problem, width)
    yield _reasons(planned, width)
    if hint := larger_batch(planned.problem, planned.best):
        yield wrapped(hint, width)
    yield from _tight(planned.best, planned.problem, width)
    yield f"Planned by {options.planner} in {format_seconds(planned.seconds)}."
    yield _costs(planned.problem, options, width)
    if options.out is not None:
        yield _written(options.out, planned.best.plan, options)
    yield from _drawn(options, planned.best, planned.problem)


def run_compare(options: CompareOptions, width: int) -> Iterator[str]:
    """Let planners plan, or one of them for several policies of weight versions, and yield their plans side by side."""
    problem = problem_of(options)
    if options.policies:
        yield policies_table(problem, _by_policy(problem, options), width=width)
        yield _costs(problem, options, width)
        return
    attempts = [_attempt(problem, planner) for planner in dict.fromkeys(options.planners)]
    yield attempts_table(attempts, problem.samples, width=width)
    yield _costs(problem, options, width)


def run_simulate(options: SimulateOptions, width: int) -> Iterator[str]:
    """Judge a given plan, and yield its tables."""
    width = min(width, WIDTH)
    problem = problem_of(options)
    judged = _given(str(options.plan), problem)
    yield from _tables(judged, problem, width)
    if difference := difference_of(judged, problem):
        yield wrapped(difference, width)
    if (excess := judged.overflow(problem.cluster)) > 0:
        yield f"Predicted: the plan does not fit; the fullest rank needs {format_bytes(excess)} more than it has."
    yield from _tight(judged, problem, width)
    yield _costs(problem, options, width)
    yield from _drawn(options, judged, problem)


def run_explain(options: ExplainOptions, width: int) -> Iterator[str]:
    """Plan, or judge a given plan, and yield what speaks for and against it."""
    width = min(width, WIDTH)
    planned = _explained(options)
    yield stages_table(planned.best, planned.problem, width=width)
    yield _reasons(planned, width)
    yield from _tight(planned.best, planned.problem, width)
    yield _costs(planned.problem, options, width)


def run_report(options: ReportOptions, width: int) -> Iterator[str]:
    """Plan, or judge a given plan, and write what is predicted of it as one HTML page."""
    planned = _explained(options)
    page = page_of(planned.problem, planned.best, planned.others)
    path = Path(options.out)
    try:
        path.write_text(html_page(page), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the report: {error}. Change out=.") from None
    yield f"{page.title}: predicted {format_seconds(planned.best.step_s)} per step."
    yield f"Wrote the report to {path}; open it in a browser."


def _explained(options: ExplainOptions) -> _Planned:
    if options.plan is None:
        return _planned(options, options.planner)
    problem = problem_of(options)
    return _Planned(problem, _given(options.plan, problem), _attempted(problem), 0.0)


def _planned(options: WishedOptions, planner: str) -> _Planned:
    problem = problem_of(options)
    started = time.perf_counter()
    best, *others = propose(problem, planner)
    return _Planned(problem, best, others, time.perf_counter() - started)


def _given(path: str, problem: Problem) -> Judged:
    plan = load_yaml(Plan, path)
    check_weights(plan)
    check_samples(plan.microbatches, problem.samples)
    return judge(plan, problem)


def _attempted(problem: Problem) -> Sequence[Judged]:
    """Return what `auto` would do instead of a given plan; nothing if it finds no plan that fits."""
    try:
        return propose(problem, "auto")
    except PlanError:
        return ()


def _attempt(problem: Problem, planner: str) -> Attempt:
    started = time.perf_counter()
    try:
        found: Judged | str = propose(problem, planner)[0]
    except PipeError as error:
        found = str(error)
    return Attempt(planner, time.perf_counter() - started, found)


def _by_policy(problem: Problem, options: CompareOptions) -> dict[str, Judged | str]:
    names = ("sync", *options.policies)
    return {name: _attempt(problem.with_versions(name), options.planner).found for name in names}


def _tables(judged: Judged, problem: Problem, width: int) -> Iterator[str]:
    yield stages_table(judged, problem, width=width)
    yield rank_table(judged, problem, width=width)


def _reasons(planned: _Planned, width: int) -> str:
    best, timeline = planned.best, planned.best.timeline
    chosen = chosen_options(planned.problem.constraints)
    return explain(alternatives(planned.problem, best, planned.others), timeline=timeline, chosen=chosen, width=width)


_FULL = 0.95  # of a device's memory; runs held to 5 % more than was foreseen have trained (docs/memory.md)


def _tight(judged: Judged, problem: Problem, width: int) -> Iterator[str]:
    """Yield a warning if the fullest rank has next to no room for what no plan foresees."""
    shares = [peak / problem.cluster.device(rank).memory_bytes for rank, peak in enumerate(judged.peak_bytes)]
    fullest = max(range(len(shares)), key=shares.__getitem__)
    if _FULL < shares[fullest] <= 1:
        yield wrapped(
            f"Predicted: rank {fullest} is full to {format_share(shares[fullest])}. Fragmentation and the libraries' "
            "own memory are not predicted: leave room for them with memory_limit=.",
            width,
        )


def _costs(problem: Problem, options: StepOptions, width: int) -> str:
    profile = problem.profile
    text = (
        f"Costs are {profile.source} (device: {profile.device}); speeds of the cluster are relative to that device. "
        f"{overhead_sentence(problem, options)}"
    )
    if profile.device == "nominal" and options.cluster is not None and options.speed == 1:
        text += (
            " A nominal device is about as fast as one core of a CPU: set speed= to how many times faster the "
            "cluster's are, or links look too fast."
        )
    return wrapped(text, width)


def _written(path: str, plan: Plan, options: StepOptions) -> str:
    """Write a plan; that of a model fits the model wherever it is captured, on whatever kind of device."""
    portable = replace(plan, graph="") if options.model is not None else plan
    try:
        save_yaml(portable, path)
    except OSError as error:
        raise ConfigError(f"cannot write the plan: {error}. Change out=, or set out=null.") from None
    if options.model is None:
        return f"Wrote the plan to {path}; it names layers of the profile, so `simulate` takes it, and no module does."
    return f"Wrote the plan to {path}; use it with DappleStrategy(plan={path!r})."


def _drawn(options: Drawn, judged: Judged, problem: Problem) -> Iterator[str]:
    if options.draw is None and options.trace is None:
        return
    judged = unfolded(judged, problem)
    curves = {rank: tuple(zip(c.times, c.total_bytes, strict=True)) for rank, c in enumerate(judged.curves)}
    try:
        if options.draw is not None:
            picture = Path(options.draw)
            memory = picture.with_name(f"{picture.stem}_memory.png")
            limits = {rank: problem.cluster.device(rank).memory_bytes for rank in curves}
            plot_timeline(judged.timeline, picture, title="predicted", notes=notes_of(judged))
            plot_memory(curves, memory, limits=limits, title="predicted")
            yield f"Drew {picture} and {memory}."
        if options.trace is not None:
            Path(options.trace).write_text(
                chrome_trace(judged.timeline, memory=curves, traffic=judged.program.traffic), encoding="utf-8"
            )
            yield f"Wrote the timeline to {options.trace}; open it in ui.perfetto.dev."
    except OSError as error:
        raise ConfigError(f"cannot write the timeline: {error}. Change draw= or trace=.") from None
