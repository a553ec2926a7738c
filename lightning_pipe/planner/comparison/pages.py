"""Put together what a report page shows of a plan: tables, predicted memory by kind, and the other plans judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from rich.table import Table

from lightning_pipe.core.cluster import Cluster
from lightning_pipe.core.graph import Graph
from lightning_pipe.core.plan import Plan, microbatch_sizes
from lightning_pipe.core.serial import to_yaml
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.cost.stage import position_seconds
from lightning_pipe.planner.comparison.alternatives import alternatives, chosen_options
from lightning_pipe.planner.comparison.throughput import model_flops, tokens_text
from lightning_pipe.planner.evaluation.evaluate import Judged
from lightning_pipe.planner.problem import Problem
from lightning_pipe.report import Comparison, Curve, sentences
from lightning_pipe.report.comparison_table import comparison_grid
from lightning_pipe.report.explain import alternatives_grid
from lightning_pipe.report.identity import identity
from lightning_pipe.report.page import JudgedPlan, Page, Stack, thinned
from lightning_pipe.report.table import WIDTH, plan_grid, text_of
from lightning_pipe.schedule.registry import planned_join
from lightning_pipe.simulator import MemoryCurve
from lightning_pipe.units import counted_noun, format_bytes, format_share, numbers_text

_MOST_POINTS = 12_000  # of all memory curves of a page
_MOST_CANDIDATES = 300
_MOST_CUTS = 2  # that the name of a layout lists
_NO_LIMIT = 1 << 60  # bytes, more than any device has: nominal ones


def page_of(
    problem: Problem,
    best: Judged,
    others: Sequence[Judged],
    *,
    predicted: Timeline | None = None,
    curves: Sequence[MemoryCurve] = (),
    measured: Timeline | None = None,
    comparison: Comparison | None = None,
    held: Mapping[int, Curve] | None = None,
) -> Page:
    """Return the page of a plan.

    Args:
        problem: what was planned.
        best: the plan.
        others: other candidates of its planner, best first.
        predicted, curves: the simulated step and its memory, by rank; those of `best` by default.
        measured: the recorded step, if any.
        comparison: of predicted and recorded steps, if they can be compared; measured peaks are taken from it.
        held: measured bytes kept for the backward over time, by rank.
    """
    is_counted = problem.profile.source == "counted" and measured is not None
    ways = alternatives(problem, best, others)
    tables = [("Plan", stages_grid(best, problem)), ("Alternatives", alternatives_grid(ways))]
    if comparison is not None:
        tables.append(("Predicted and measured", comparison_grid(comparison)))
    if problem.cluster.overhead_bytes:
        tables.append(("Memory that no plan may use", _overhead_grid(problem.cluster)))
    return Page(
        title=_title(best.plan, problem.samples),
        identity=identity(
            problem.module,
            parameters=problem.parameters,
            parameter_bytes=sum(problem.graph.parameter_bytes.values()),
            devices=_devices(problem.cluster),
        ),
        costs=_costs(problem, is_counted=is_counted),
        samples=problem.samples,
        rates=partial(_rates, problem),
        tables=tuple(tables),
        sentences=tuple(sentences(ways, timeline=best.timeline, chosen=chosen_options(problem.constraints))),
        predicted=None if is_counted else predicted or best.timeline,
        memory=tuple(_stacks(problem, best, curves or best.curves, held=held or {}, comparison=comparison)),
        candidates=tuple(_candidates(problem, best, others)),
        plan=to_yaml(best.plan),
        measured=measured,
        comparison=comparison,
        ranks=None if predicted is not None else _names(best),
    )


def stages_table(judged: Judged, problem: Problem, *, width: int = WIDTH) -> str:
    """Return the stages of a plan with their shares of the seconds, as text."""
    return text_of(stages_grid(judged, problem), width)


def stages_grid(judged: Judged, problem: Problem) -> Table:
    """Return the stages of a plan with their shares of the seconds."""
    largest = max(microbatch_sizes(problem.samples, judged.plan.microbatches))
    seconds = [sum(both) for both in position_seconds(problem.graph, problem.profile, largest)]
    joinable = judged.program.traffic.joinable if planned_join(judged.plan) > 1 else None
    return plan_grid(judged.plan, replace(problem.graph, samples=problem.samples), seconds=seconds, joinable=joinable)


def _rates(problem: Problem, step_s: float) -> dict[str, str]:
    """Return tokens per second, and operations with their share of the peak, where they are known."""
    tokens, flops = tokens_text(problem, step_s), model_flops(problem, step_s)
    rates = {"tokens per second": tokens} if tokens else {}
    if flops is not None:
        rates["TFLOP/s per device"] = f"{flops.per_device / 1e12:.3g}"
        if flops.utilization is not None:
            rates["MFU"] = format_share(flops.utilization, 0)
    return rates


def _devices(cluster: Cluster) -> str:
    kinds = Counter(device.kind for host in cluster.hosts for device in host.devices)
    devices = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{devices} on {', '.join(host.name for host in cluster.hosts)}"


def _overhead_grid(cluster: Cluster) -> Table:
    """Return what communicators, contexts and libraries take on each rank, and what is left for plans."""
    table = Table("rank")
    for heading in ("communicators, contexts and libraries", "left for plans"):
        table.add_column(heading, justify="right")
    for rank in range(cluster.ranks):
        device = cluster.device(rank)
        table.add_row(str(rank), format_bytes(device.overhead_bytes), format_bytes(device.memory_bytes))
    return table


def _title(plan: Plan, samples: int) -> str:
    batch = f"{samples} samples in {counted_noun(plan.microbatches, 'micro-batch')}"
    ranks = len({rank for stage in plan.stages for rank in stage.ranks})
    if len(plan.stages) == 1:
        return f"Data parallel on {ranks} ranks: {batch}" if ranks > 1 else f"One device: {batch}"
    return f"{counted_noun(len(plan.stages), 'stage')} on {counted_noun(ranks, 'rank')}, {plan.schedule}: {batch}"


def _costs(problem: Problem, *, is_counted: bool) -> str:
    if is_counted:
        return (
            "Costs were counted for a nominal device, so the seconds of this machine are not predicted: the timeline "
            "is what was measured, and seconds in words and tables are those of the nominal device. costs='measured' "
            "predicts this machine's."
        )
    return f"Costs are {problem.profile.source} (device: {problem.profile.device})."


def _names(judged: Judged) -> dict[int, str]:
    """Return for every rank that is simulated the ranks that do the same."""
    same: dict[int, list[int]] = {}
    for rank, representative in enumerate(judged.representatives):
        same.setdefault(representative, []).append(rank)
    return {representative: numbers_text(ranks) for representative, ranks in same.items()}


def _stacks(
    problem: Problem,
    judged: Judged,
    curves: Sequence[MemoryCurve],
    *,
    held: Mapping[int, Curve],
    comparison: Comparison | None,
) -> list[Stack]:
    peaks = {} if comparison is None else {line.rank: round(line.total.measured) for line in comparison.memory}
    same: dict[tuple[object, ...], list[int]] = {}
    for rank, curve in enumerate(curves):
        device = problem.cluster.device(rank).memory_bytes
        own = rank if rank in held or rank in peaks else None  # what was measured stands alone
        same.setdefault((curve, judged.prices.state_parts(rank), device, own), []).append(rank)
    most = max(100, _MOST_POINTS // len(same))
    stacks = []
    for ranks in same.values():
        first = ranks[0]
        curve, state = curves[first], judged.prices.state_parts(first)._asdict()
        state["parameters"] += state.pop("versions")
        series = (curve.held_bytes, curve.buffer_bytes, curve.workspace_bytes)
        times, (saved, messages, workspace) = thinned(curve.times, series, most=most)
        limit = problem.cluster.device(first).memory_bytes
        kept = held.get(first, ())
        points, (amounts,) = thinned([time for time, _ in kept], [[amount for _, amount in kept]], most=most)
        stacks.append(
            Stack(
                ranks=numbers_text(ranks),
                times=tuple(times),
                kinds={
                    **{kind: (amount,) * len(times) for kind, amount in state.items()},
                    "saved": tuple(saved),
                    "messages": tuple(messages),
                    "workspace": tuple(workspace),
                },
                limit=limit if limit < _NO_LIMIT else None,
                measured_saved=tuple(zip(points, amounts, strict=True)),
                measured_peak=peaks.get(first),
            )
        )
    return stacks


def _candidates(problem: Problem, best: Judged, others: Sequence[Judged]) -> list[JudgedPlan]:
    """Return the plan, then the fastest of the others for each layout, schedule and number of micro-batches."""
    found: dict[tuple[str, str, int], JudgedPlan] = {}
    for judged in (best, *others):
        plan = judged.plan
        starts = [_module(problem.graph, stage.at) for stage in plan.stages[1 : _MOST_CUTS + 1]]
        layout = ", ".join([plan.layout_text, *(f"cut before {start}" for start in starts)])
        if len(plan.stages) > _MOST_CUTS + 1:
            layout += ", …"
        candidate = JudgedPlan(
            layout=layout,
            schedule=plan.schedule,
            microbatches=plan.microbatches,
            step_s=judged.step_s,
            bubble=judged.bubble,
            peak_bytes=max(judged.peak_bytes),
            fits=judged.overflow(problem.cluster) <= 0,
        )
        found.setdefault((layout, plan.schedule, plan.microbatches), candidate)  # the plan comes first, then the best
    return list(found.values())[:_MOST_CANDIDATES]


def _module(graph: Graph, at: str) -> str:
    """Return the module in which a stage begins; the node, if it is in none."""
    return graph.nodes[graph.position(at)].module or at
