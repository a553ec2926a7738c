"""Report of plan, prediction and measurement: tables in the log, files if wanted."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from lightning_pipe.config import DappleConfig
from lightning_pipe.core.cluster import Cluster
from lightning_pipe.core.cluster_file import save_cluster
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import microbatch_sizes
from lightning_pipe.core.serial import save_json, save_yaml
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.cost.stage import Cutter, position_seconds
from lightning_pipe.errors import ConfigError
from lightning_pipe.lightning_names import pl, rank_zero_info, rank_zero_warn
from lightning_pipe.planner.comparison.alternatives import alternatives, difference_of
from lightning_pipe.planner.comparison.pages import page_of
from lightning_pipe.planner.evaluation.evaluate import Judged, predicted_round
from lightning_pipe.planner.evaluation.rounds import VersionsRead, versions_read
from lightning_pipe.planner.problem import Problem
from lightning_pipe.report import (
    Comparison,
    Page,
    PlanSituation,
    RankPeak,
    advice,
    chrome_trace,
    compare,
    comparison_table,
    explain,
    flights,
    html_page,
    idle_stages,
    plan_table,
    plot_stacks,
    plot_timeline,
)
from lightning_pipe.schedule.registry import planned_join
from lightning_pipe.schedule.rounds import all_rounds
from lightning_pipe.simulator import MemoryCurve, memory_curves, simulate
from lightning_pipe.simulator.ahead import with_entering
from lightning_pipe.strategy.plans.planning import Planned
from lightning_pipe.strategy.plans.recording import Recorded
from lightning_pipe.units import format_bytes, format_seconds, format_share


@dataclass(frozen=True)
class Findings:
    """Prediction and measurement of the first steps.

    Attributes:
        comparison: of times and, where measured, of memory.
        predicted: the simulated step.
        curves: its memory, by rank.
    """

    comparison: Comparison
    predicted: Timeline
    curves: tuple[MemoryCurve, ...]


def make_room(config: DappleConfig) -> None:
    """Make the directories of report and timeline, before training rather than after its first steps.

    Raises:
        ConfigError: if that is not possible.
    """
    wanted = {"report": config.report, "trace": config.trace}
    for option, path in wanted.items():
        if path is None:
            continue
        is_folder = option == "report" and Path(path).suffix != ".html"
        folder = Path(path) if is_folder else Path(path).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigError(
                f"found {option}={path!r}, but nothing can be written to {folder} ({error.strerror}); expected a "
                "directory that exists, or can be made, on the host of rank 0."
            ) from error


def introduce(planned: Planned, graph: Graph) -> None:
    """Show the plan, and, if costs were measured, why it was chosen and whether it fits.

    Args:
        planned: the plan.
        graph: its graph, with the samples of the whole batch.
    """
    problem = planned.problem
    difference = filter(None, [difference_of(planned.judged[0], problem)])
    if problem.profile.source != "measured":
        table = plan_table(planned.plan, graph, joinable=_joinable(planned))
        rank_zero_info("\n".join([planned.route, table, *difference, *_advice(planned, graph)]))
        return
    largest = max(microbatch_sizes(problem.samples, planned.plan.microbatches))
    seconds = [sum(both) for both in position_seconds(problem.graph, problem.profile, largest)]
    table = plan_table(planned.plan, graph, seconds=seconds, joinable=_joinable(planned))
    predicted = _predicted(planned.judged[0], problem.cluster)
    rank_zero_info("\n".join([planned.route, table, "", *difference, predicted, *_advice(planned, graph)]))
    missing = planned.judged[0].overflow(problem.cluster)
    if missing > 0:
        rank_zero_warn(
            f"The plan is predicted to exceed the memory of a device by {format_bytes(missing)}. Use more devices, "
            "smaller batches, or more micro-batches with schedule='1f1b' and warmup='pa'."
        )


def _predicted(judged: Judged, cluster: Cluster) -> str:
    """Return what is predicted of a plan in one line."""
    overhead = cluster.overhead_bytes
    beside = f", beside {format_bytes(overhead)} of communicators and libraries" if overhead else ""
    return (
        f"Predicted: {format_seconds(judged.step_s)} per step, bubble {format_share(judged.bubble)}, at most "
        f"{format_bytes(max(judged.peak_bytes))} per device{beside}."
    )


def _joinable(planned: Planned) -> tuple[int, ...] | None:
    """Return the stages that can join W, if the plan wants that."""
    if planned_join(planned.plan) == 1:
        return None
    return Cutter(planned.problem.graph).traffic(planned.cuts).joinable


def findings(planned: Planned, recorded: Recorded) -> Findings | None:
    """Compare what was recorded with the prediction for the same program.

    None if nothing was measured before, so that the prediction is for nominal devices; if the step that ran is not the
    one that was planned (it was captured again); if it sends what is not predicted (`exact_ties`); or if all rounds
    that ran have filled or emptied the pipeline.
    """
    problem = planned.problem
    if problem.profile.source != "measured" or recorded.graph != problem.graph.fingerprint:
        return None
    program, layout, prices = recorded.program, planned.plan.layout, planned.judged[0].prices
    if set(program.traffic.edges) != set(prices.traffic.edges):
        return None
    if program.seam is not None and not program.seam.is_even:
        return None
    begins = (0.0,) * len(program.ranks) if problem.runs_ahead else None
    cards = prices if len(problem.cluster.hosts) > 1 else None
    if program.seam is None:
        predicted = simulate(program, prices, begins=begins, cards=cards)
    else:
        predicted = predicted_round(program, prices, problem)
    curves = memory_curves(predicted, program=program, prices=prices)
    predicted = with_entering(predicted, program)
    expected = [RankPeak(curve.peak_bytes, curve.peak_total_bytes) for curve in curves]
    comparison = compare(
        predicted,
        recorded.comparable,
        layout=layout,
        predicted_memory=expected if recorded.memory else (),
        measured_memory=recorded.memory,
    )
    return Findings(comparison, predicted, curves)


def reasons(planned: Planned) -> str:
    """Explain a plan that was made among several."""
    best, *others = planned.judged
    ways = alternatives(_constrained(planned), best, others)
    return explain(ways, timeline=best.timeline, chosen=planned.chosen)


def _constrained(planned: Planned) -> Problem:
    """Return the problem with the constraints that the plan keeps to."""
    versions = planned.problem.constraints.versions
    return replace(planned.problem, constraints=replace(planned.wanted.constraints, versions=versions))


def _advice(planned: Planned, graph: Graph) -> list[str]:
    """Return what is advised of a plan; of counted costs only what holds whatever they are."""
    best, *others = planned.judged
    is_measured = planned.problem.profile.source == "measured"
    situation = PlanSituation(
        planned.chosen,
        planned.whole,
        alternatives(_constrained(planned), best, others) if is_measured else (),
        best.timeline,
        idle_stages=idle_stages(planned.plan, graph),
        idle_ranks=planned.plan.idle_ranks,
        microbatches=planned.plan.microbatches,
        is_disturbed=planned.is_disturbed,
    )
    return advice(situation)


def write_files(
    config: DappleConfig, planned: Planned, recorded: Recorded, found: Findings | None, *, module: pl.LightningModule
) -> None:
    """Write the timeline and the report that are wanted; where that fails, go on training, and warn."""
    if config.trace is not None:
        with _unless_disk_fails("trace", config.trace):
            write_trace(Path(config.trace), recorded, found)
    if config.report is not None:
        with _unless_disk_fails("report", config.report):
            problem = _about(planned.problem, module)
            write_report(Path(config.report), replace(planned, problem=problem), recorded, found)


def _about(problem: Problem, module: pl.LightningModule) -> Problem:
    """Return the problem with what a report says of the module."""
    tokens = getattr(module, "tokens_per_sample", 0)
    return replace(
        problem,
        tokens=tokens if isinstance(tokens, int) else 0,
        module=f"{type(module).__module__}.{type(module).__qualname__}",
        parameters=sum(parameter.numel() for parameter in module.parameters()),
    )


@contextlib.contextmanager
def _unless_disk_fails(option: str, path: str) -> Iterator[None]:
    """Turn an error of the disk into a warning, which names the path: training does without these files."""
    try:
        yield
    except OSError as error:
        rank_zero_warn(
            f"What {option}={path!r} asks for cannot be written, or not whole ({error.strerror or error}); training "
            "goes on without it."
        )


def write_trace(path: Path, recorded: Recorded, found: Findings | None) -> None:
    """Write the recorded steps, and the predicted one, for Perfetto."""
    path.parent.mkdir(parents=True, exist_ok=True)
    events = Timeline(tuple(event for timeline in recorded.timelines for event in timeline.events))
    predicted = found.predicted if found is not None else None
    messages = [flight for timeline in recorded.timelines for flight in flights(timeline)]
    trace = chrome_trace(
        events, memory=recorded.held, predicted=predicted, messages=messages, traffic=recorded.program.traffic
    )
    path.write_text(trace, encoding="utf-8")
    rank_zero_info(f"Wrote the timeline of {len(recorded.timelines)} steps to {path}; open it in ui.perfetto.dev.")


def write_report(path: Path, planned: Planned, recorded: Recorded, found: Findings | None) -> None:
    """Write everything that is known: as one HTML page if the path ends so, else to a directory, with the page in it.

    `plan.yaml`, `cluster.yaml` and `profile.json` can be given to other runs; `report.txt` is what the log says;
    `timeline.json` is for Perfetto. With matplotlib there are `timeline.png` and `memory.png` too.
    """
    is_page = path.suffix == ".html"
    folder = path.parent if is_page else path
    folder.mkdir(parents=True, exist_ok=True)
    page = path if is_page else path / "report.html"
    shown = _page(planned, recorded, found)
    page.write_text(html_page(shown), encoding="utf-8")
    rank_zero_info(f"Wrote the report to {page}; open it in a browser.")
    if is_page:
        return
    save_yaml(planned.plan, folder / "plan.yaml")
    save_cluster(planned.problem.cluster, folder / "cluster.yaml")
    save_json(planned.problem.profile, folder / "profile.json")
    tables = [planned.route, *([reasons(planned)] if planned.judged else [])]
    if found is not None:
        tables.append(comparison_table(found.comparison))
    (folder / "report.txt").write_text("\n\n".join(tables) + "\n", encoding="utf-8")
    write_trace(folder / "timeline.json", recorded, found)
    if find_spec("matplotlib") is None:
        rank_zero_info(
            "matplotlib is not installed, so the report has no pictures: pip install 'lightning-pipe[plots]'."
        )
    else:
        _write_plots(folder, shown, _versions_read(planned, recorded))


def _page(planned: Planned, recorded: Recorded, found: Findings | None) -> Page:
    best, *others = planned.judged
    if found is None:
        return page_of(planned.problem, best, others, measured=recorded.comparable[-1])
    return page_of(
        planned.problem,
        best,
        others,
        predicted=found.predicted,
        curves=found.curves,
        measured=recorded.comparable[found.comparison.typical],
        comparison=found.comparison,
        held=recorded.held,
    )


def _versions_read(planned: Planned, recorded: Recorded) -> VersionsRead:
    """Return which version of the weights every compute of the recorded round reads; {} without versions."""
    policy, program = planned.problem.policy, recorded.program
    if policy is None or not program.is_ahead:
        return {}
    sizes, filling = program.sizes[: program.batch], -(-len(program.sizes) // program.batch)
    rounds = all_rounds(policy, program.layout, sizes=sizes, traffic=program.traffic, batches=3 * filling)
    return versions_read(rounds, policy, filling, filling)


def _write_plots(folder: Path, page: Page, read: VersionsRead) -> None:
    """Draw what the page draws, and which versions of the weights are read."""
    assert page.measured is not None, "a run was recorded"
    plot_timeline(page.measured, folder / "timeline.png", predicted=page.predicted, notes=read)
    plot_stacks(page.memory, folder / "memory.png")
