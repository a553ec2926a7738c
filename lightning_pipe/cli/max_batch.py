"""`lightning-pipe max-batch`: the largest batch, or the deepest model, that trains within memory, by policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from lightning_pipe.cli.options import StepOptions, check_names, option
from lightning_pipe.cli.problem import problem_of
from lightning_pipe.core.cluster import NO_SWAP, Cluster, Link
from lightning_pipe.errors import ConfigError
from lightning_pipe.planner.comparison.capacity import POLICIES, Largest, deepest_models, largest_batches
from lightning_pipe.planner.problem import Constraints, Problem
from lightning_pipe.planner.registry import PLANNER_NAMES
from lightning_pipe.report.table import text_of
from lightning_pipe.units import format_bytes, format_seconds, parse_rate


@dataclass(frozen=True)
class MaxBatchOptions(StepOptions):
    """Find the largest batch, or the deepest model, that fits into memory, for every activation policy."""

    microbatches: int | None = option(None, "micro-batches per batch; null takes two per device")
    policies: tuple[str, ...] = option(tuple(POLICIES), "policies to compare")
    planner: str = option("auto", "planner, for the policies that plan: one of " + ", ".join(PLANNER_NAMES))
    swap: str | None = option(None, "rate of copies to the host's memory, such as '12 GB/s'; default: the cluster's")
    deepest: str | None = option(None, "argument of the model that is its depth: find the deepest model for one batch")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names("policies", self.policies, tuple(POLICIES))
        check_names("planner", (self.planner,), PLANNER_NAMES)
        if self.swap is not None:
            parse_rate(self.swap)
        if self.deepest is not None and self.model is None:
            raise ConfigError(
                f"found deepest={self.deepest!r} without model=; expected a model that takes its depth as an argument"
            )


def run_max_batch(options: MaxBatchOptions, width: int) -> Iterator[str]:
    """Yield the table of what every policy reaches."""
    problem = _problem(options)
    memory = sorted({problem.cluster.device(rank).memory_bytes for rank in range(problem.cluster.ranks)})
    if memory[-1] >= _NO_LIMIT:
        raise ConfigError(
            "found devices of unlimited memory, in which everything fits; expected memory_limit=16GiB, say"
        )
    if options.deepest is None:
        found = list(largest_batches(problem, policies=options.policies, planner=options.planner))
    else:
        start = options.model_args.get(options.deepest)
        if not isinstance(start, int) or start < 1:
            raise ConfigError(
                f"found model_args.{options.deepest}={start!r}; expected the depth at which to begin, such as "
                f"+model_args.{options.deepest}=4"
            )
        found = list(
            deepest_models(
                lambda depth: _problem(_as_deep(options, depth)),
                policies=options.policies,
                planner=options.planner,
                start=start,
            )
        )
    yield _table(found, problem, options, width)
    yield (
        f"Devices have {' to '.join(format_bytes(size) for size in dict.fromkeys((memory[0], memory[-1])))}. "
        f"Predicted by simulation; costs are {problem.profile.source}. What each policy does: docs/memory.md."
    )


_NO_LIMIT = 1 << 60  # bytes, more than any device has: nominal ones


def _as_deep(options: MaxBatchOptions, depth: int) -> MaxBatchOptions:
    return replace(options, model_args={**options.model_args, str(options.deepest): depth})


def _problem(options: MaxBatchOptions) -> Problem:
    problem = problem_of(options)
    cluster = problem.cluster if options.swap is None else _swapping(problem.cluster, parse_rate(options.swap))
    return replace(problem, cluster=cluster, constraints=Constraints(microbatches=options.microbatches))


def _swapping(cluster: Cluster, bytes_per_s: float) -> Cluster:
    """Return the cluster with this rate between devices and their hosts."""
    hosts = (
        replace(host, swap=Link(_LATENCY_S if host.swap == NO_SWAP else host.swap.latency_s, bytes_per_s))
        for host in cluster.hosts
    )
    return replace(cluster, hosts=tuple(hosts))


_LATENCY_S = 1e-5  # of a copy, where the cluster does not say it


def _table(found: Sequence[Largest], problem: Problem, options: MaxBatchOptions, width: int) -> str:
    what = "deepest" if options.deepest is not None else "micro-batch"
    table = Table(box=box.SIMPLE)
    table.add_column("policy", no_wrap=True)
    for heading in (what, "batch", "step", "samples/s", "peak memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("remark", overflow="fold")
    for one in found:
        if one.trial is None:
            table.add_row(one.policy, "0", "", "", "", "", one.reason)
            continue
        samples, step_s = one.trial.problem.samples, one.trial.step_s
        plan = one.trial.judged.plan
        given_up = [key for key in ("recompute", "offload") if any(getattr(stage, key) for stage in plan.stages)]
        remark = ", ".join([*given_up, *["shared optimizer state"] * plan.shard_optimizer])
        table.add_row(
            one.policy,
            str(one.size),
            str(samples),
            format_seconds(step_s),
            f"{samples / step_s:.4g}",
            format_bytes(max(one.trial.peaks)),
            remark,
        )
    return text_of(table, width)
