"""Tables of the command line in plain text: predictions of a plan by rank, and planners side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.markup import escape
from rich.table import Table

from lightning_pipe.planner.comparison.throughput import model_flops, tokens_text
from lightning_pipe.planner.evaluation.evaluate import Judged, judge
from lightning_pipe.planner.portfolio.schedule_candidates import best_exact
from lightning_pipe.planner.problem import Problem
from lightning_pipe.report.table import WIDTH, text_of, wrapped
from lightning_pipe.schedule.rounds import delays_of
from lightning_pipe.units import format_bytes, format_seconds, format_share, numbers_text

_NO_LIMIT = 1 << 60  # bytes, more than any device has: nominal ones


def rank_table(judged: Judged, problem: Problem, *, width: int = WIDTH) -> str:
    """Return what is predicted of the step, and of every rank: seconds, bubble, and memory against its limit.

    Ranks of which the same is predicted share a row.
    """
    tokens, flops = tokens_text(problem, judged.step_s), model_flops(problem, judged.step_s)
    facts = [
        f"Predicted: step {format_seconds(judged.step_s)}",
        f"{problem.samples / judged.step_s:.4g} samples/s",
        *([f"{tokens} tokens/s"] if tokens else []),
        *([str(flops)] if flops is not None else []),
        f"bubble {format_share(judged.bubble)}",
    ]
    headline = ", ".join(facts)
    table = Table(box=box.SIMPLE)
    for heading in ("rank", "device", "stages"):
        table.add_column(heading, overflow="ellipsis", no_wrap=True)
    for heading in ("computes", "waits", "bubble", "memory", "of", "fits"):
        table.add_column(heading, justify="right", no_wrap=True)
    timeline = judged.timeline
    rows: dict[tuple[str, ...], list[int]] = {}  # ranks of which the same is predicted
    for rank, (timed, peak) in enumerate(zip(judged.representatives, judged.peak_bytes, strict=True)):
        device, busy = problem.cluster.device(rank), timeline.busy(timed)
        stages = [str(s) for s, stage in enumerate(judged.plan.stages) if rank in stage.ranks]
        cells = (
            device.kind,
            ",".join(stages),
            format_seconds(busy),
            format_seconds(max(0.0, timeline.span(timed) - busy)),
            format_share(timeline.bubble(timed)),
            format_bytes(peak),
            format_bytes(device.memory_bytes) if device.memory_bytes < _NO_LIMIT else "any",
            "yes" if peak <= device.memory_bytes else "no",
        )
        rows.setdefault(cells, []).append(rank)
    for figures, ranks in rows.items():
        table.add_row(numbers_text(ranks), *figures)
    return f"{wrapped(headline, width)}\n\n{text_of(table, width)}"


@dataclass(frozen=True)
class Attempt:
    """What became of one planner.

    Attributes:
        planner: its name.
        seconds: that it took.
        found: its plan, or why there is none.
    """

    planner: str
    seconds: float
    found: Judged | str


_OF_POLICIES = (
    "step",
    "of sync",
    "clipped\nby norm",
    "with\na flush",
    "best exact\nschedule",
    "updates behind\nby stage",
    "versions\nby stage",
    "peak\nmemory",
    "ranks\nper stage",
    "micro-\nbatches",
)


_EXACT = (
    "The best exact schedule runs as many micro-batches on the same devices, with the gradients of one device. A "
    "policy is worth its delay only if it is quicker; docs/weights.md measures what late gradients cost a GPT."
)


def policies_table(problem: Problem, found: Mapping[str, Judged | str], *, width: int) -> str:
    """Return policies of weight versions side by side, each with its plan.

    Args:
        problem: what is planned, for a pipeline that is flushed.
        found: of each policy, `sync` first, its plan, or why there is none.
        width: of the table.
    """
    table = Table(box=box.SIMPLE, title=f"{problem.samples} samples per step", title_justify="left")
    table.add_column("versions", no_wrap=True)
    for heading in _OF_POLICIES:
        table.add_column(heading, justify="right", overflow="fold")
    exact = dict[object, Judged]()  # best schedule that is flushed, by stages and micro-batches
    for name, judged in found.items():
        if isinstance(judged, str):
            table.add_row(name, *("-",) * len(_OF_POLICIES))
            continue
        sync, policy, layout = found["sync"], judged.policy, judged.plan.layout
        delays = lives = "-"
        clipped_s = flushed_s = judged.step_s
        if policy is not None:
            count = judged.plan.microbatches
            delays = " ".join(map(str, delays_of(policy, len(layout.stages), count)))
            lives = " ".join(map(str, policy.lives(layout, count)))
            clipped_s = judge(judged.plan, replace(problem.with_versions(name), steps_together=True)).step_s
            flushed_s = judge(judged.plan, problem).step_s
        key = (judged.plan.stages, judged.plan.microbatches)
        best = exact[key] = exact.get(key) or best_exact(problem, judged.plan)
        table.add_row(
            name,
            format_seconds(judged.step_s),
            f"{judged.step_s / sync.step_s:.3f}" if isinstance(sync, Judged) else "-",
            format_seconds(clipped_s),
            format_seconds(flushed_s),
            f"{format_seconds(best.step_s)} {best.plan.schedule}",
            delays,
            lives,
            format_bytes(max(judged.peak_bytes)),
            judged.plan.layout_text,
            str(judged.plan.microbatches),
        )
    reasons = _reasons({name: judged for name, judged in found.items() if isinstance(judged, str)})
    return "\n".join([text_of(table, width), wrapped(_EXACT, width), *(wrapped(reason, width) for reason in reasons)])


def _reasons(refused: Mapping[str, str]) -> Iterator[str]:
    """Yield why policies have no plan; once for all that have the same reason but for their names."""
    alike = defaultdict[str, list[str]](list)
    for name, reason in refused.items():
        alike[reason.replace(f"versions={name!r}", "versions=...")].append(name)
    for common, names in alike.items():
        reason = common if len(names) > 1 else refused[names[0]]
        yield f"No plan for {', '.join(names)}: {reason}"


_HEADINGS = ("bubble", "peak memory", "ranks per stage", "micro-batches", "planned in")


def attempts_table(attempts: Sequence[Attempt], samples: int, *, width: int) -> str:
    """Return the plans of planners side by side, against that of `auto`, or the fastest without one of `auto`."""
    found = {attempt.planner: attempt.found for attempt in attempts if isinstance(attempt.found, Judged)}
    base = found.get("auto") or min(found.values(), key=lambda judged: judged.step_s, default=None)
    against = "auto" if "auto" in found else "best"
    failed = any(isinstance(attempt.found, str) for attempt in attempts)
    table = Table(box=box.SIMPLE, title=f"{samples} samples per step", title_justify="left")
    table.add_column("planner", no_wrap=True)
    for heading in ("step", f"of {against}", *_HEADINGS):
        table.add_column(heading, justify="right", overflow="fold", min_width=len(heading.split()[0]))
    if failed:
        table.add_column("no plan because", overflow="fold", ratio=1)
    for attempt in attempts:
        cells = _cells(attempt, base)
        table.add_row(attempt.planner, *cells, *([escape(attempt.found)] if isinstance(attempt.found, str) else []))
    return text_of(table, width)


def _cells(attempt: Attempt, base: Judged | None) -> tuple[str, ...]:
    judged = attempt.found
    if isinstance(judged, str) or base is None:
        return ("-",) * (2 + len(_HEADINGS))
    return (
        format_seconds(judged.step_s),
        f"{judged.step_s / base.step_s:.3f}",
        format_share(judged.bubble),
        format_bytes(max(judged.peak_bytes)),
        judged.plan.replicas_text,
        str(judged.plan.microbatches),
        format_seconds(attempt.seconds),
    )
