"""Rows for the Trainer's loggers: the plan once, and figures of recorded steps, under names that begin with `pipe/`.

They go to the loggers themselves, on rank 0, and not through `self.log`: `callback_metrics`, `logged_metrics` and the
progress bar stay what they are on one device. Bubble, seconds and waiting are those of `report.compare`; rates count
what lies between batches too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median, median_low

import torch

from lightning_pipe.capture import Structure
from lightning_pipe.core.timeline import Timeline
from lightning_pipe.cost.utilization import Peak, seconds_at_peak
from lightning_pipe.lightning_names import Logger, TensorBoardLogger, get_available_flops, pl, rank_zero_warn
from lightning_pipe.planner.problem import Problem
from lightning_pipe.report import mean_bubble, step_seconds
from lightning_pipe.strategy.plans.planning import Planned

_PREFIX = "pipe/"
_MOST_BATCHES = 1000  # of which the median is taken


@dataclass(frozen=True)
class _Batch:
    """One batch: seconds until the next one, and what it held."""

    seconds: float
    samples: int
    tokens: int


class PipeLog:
    """What rank 0 logs.

    Args:
        module: that is trained.
        batch_dim: dimension of the samples.
        device: of this rank.

    Attributes:
        row: the last row.
    """

    def __init__(self, module: pl.LightningModule, *, batch_dim: int, device: torch.device) -> None:
        self._module, self._batch_dim, self._device = module, batch_dim, device
        self._planned: Planned | None = None
        self._peaks: tuple[Peak, ...] | None = None
        self._begun = 0.0
        self._held: tuple[int, int] | None = None  # samples and tokens of the batch that has begun
        self._batches: deque[_Batch] = deque(maxlen=_MOST_BATCHES)  # since the last row
        self._refusing: set[tuple[int, str]] = set()
        self.row: Mapping[str, float] = {}

    def begin_batch(self) -> None:
        """Note the time."""
        now = time.perf_counter()
        if self._held is not None:
            self._batches.append(_Batch(now - self._begun, *self._held))
        self._begun, self._held = now, None

    def note_batch(self, samples: int, structure: Structure) -> None:
        """Note what the batch holds that has begun."""
        self._held = samples, samples * self._tokens_per_sample(structure)

    def log_plan(self, planned: Planned) -> None:
        """Give the loggers what the plan is, and what is predicted of it."""
        self._planned, self._peaks = planned, None
        trainer = self._module.trainer
        if not getattr(trainer, "enable_autolog_hparams", True):  # newer than the oldest Lightning that is supported
            return
        parameters = {_PREFIX + name: value for name, value in _parameters(planned).items()}
        for logger in trainer.loggers:
            self._give(logger, "the plan", partial(_log_parameters, logger, parameters, step=trainer.global_step))

    def take_rates(self, graph: str, samples: int) -> dict[str, float]:
        """Return what the median batch since the last call does per second, and forget these batches.

        Args:
            graph: fingerprint of the graph that runs.
            samples: of a batch.
        """
        batches = [*self._batches]
        self._batches.clear()
        if not batches:
            return {}
        rates = {"samples_per_s": median(batch.samples / batch.seconds for batch in batches)}
        if tokens := median(batch.tokens / batch.seconds for batch in batches):
            rates["tokens_per_s"] = tokens
        planned = self._planned
        if planned is not None and graph == planned.problem.graph.fingerprint:
            self._peaks = self._peaks or _peaks(planned.problem, self._device)
            if seconds := seconds_at_peak(planned.problem.graph, samples, self._peaks):
                rates["mfu"] = seconds / samples * rates["samples_per_s"]
        return rates

    def log_steps(
        self, timelines: Sequence[Timeline], *, memory: Sequence[int], rates: Mapping[str, float], step: int
    ) -> None:
        """Give the loggers a row.

        Args:
            timelines: of all ranks, by recorded step; of one program.
            memory: peak bytes by rank; () where they are not known.
            rates: of `take_rates`.
            step: number of the last step.
        """
        figures = {**_figures(timelines, memory), **rates}
        self.row = {_PREFIX + name: value for name, value in figures.items()}
        trainer = self._module.trainer
        if trainer.log_every_n_steps:  # type: ignore[attr-defined]  # a connector sets it, undeclared
            for logger in trainer.loggers:
                self._give(logger, "rows", partial(logger.log_metrics, dict(self.row), step=step))

    def _give(self, logger: Logger, content: str, give: Callable[[], object]) -> None:
        """Give a logger something; where it raises, say so once, as nobody's training should end for that."""
        if (id(logger), content) in self._refusing:
            return
        try:
            give()
        except Exception as error:
            self._refusing.add((id(logger), content))
            rank_zero_warn(
                f"{type(logger).__name__} does not take {content} of the pipeline ({_PREFIX}...), and is given no "
                f"more of it: {type(error).__name__}: {error}"
            )

    def _tokens_per_sample(self, structure: Structure) -> int:
        """Return the tokens of a sample, as the module states them or the first matrix of the batch has; 0 if none."""
        stated = getattr(self._module, "tokens_per_sample", None)
        if isinstance(stated, int):
            return stated
        first = next((leaf for leaf in structure.leaves if len(leaf.shape) > 1), None)
        if first is None or len(first.shape) != 2 or first.dtype not in _INTEGERS or self._batch_dim > 1:
            return 0
        return first.shape[1 - self._batch_dim]


_INTEGERS = (torch.int16, torch.int32, torch.int64)


def _figures(timelines: Sequence[Timeline], memory: Sequence[int]) -> dict[str, float]:
    """Return seconds, bubble, waiting and memory of recorded steps, by the definitions of `report.compare`."""
    seconds = [step_seconds(timeline) for timeline in timelines]
    typical = timelines[seconds.index(median_low(seconds))]
    figures = {"step_s": median_low(seconds), "bubble": mean_bubble(typical)}
    for rank in typical.ranks:
        figures[f"waiting_rank{rank}"] = median_low(
            [max(0.0, timeline.span(rank) - timeline.busy(rank)) for timeline in timelines]
        )
    return {**figures, **{f"memory_rank{rank}": peak for rank, peak in enumerate(memory)}}


def _parameters(planned: Planned) -> dict[str, str | float]:
    """Return what a plan is, and what is predicted of it where costs were measured, by name."""
    plan, config, best = planned.plan, planned.wanted, planned.judged[0]
    parameters: dict[str, str | float] = {
        "layout": plan.replicas_text,
        "stages_at": ", ".join(stage.at for stage in plan.stages[1:]),
        "replicas": max(len(stage.ranks) for stage in plan.stages),
        "schedule": plan.schedule,
        "planner": config.planner if config.plan is None else config.plan,
        "microbatches": plan.microbatches,
        "samples": planned.problem.samples,
    }
    if planned.problem.profile.source == "measured":
        parameters |= {
            "predicted_step_s": best.step_s,
            "predicted_bubble": best.bubble,
            "predicted_memory": max(best.peak_bytes),
        }
    return parameters


def _log_parameters(logger: Logger, parameters: Mapping[str, str | float], *, step: int) -> None:
    """Give a logger hyperparameters; TensorBoard as text, as of its own those are shown that are written first."""
    if isinstance(logger, TensorBoardLogger):
        rows = [f"| {name} | {value} |" for name, value in parameters.items()]
        logger.experiment.add_text(f"{_PREFIX}plan", "\n".join(["|  |  |", "|---|---|", *rows]), step)
    else:
        logger.log_hyperparams(dict(parameters))


def _peaks(problem: Problem, device: torch.device) -> tuple[Peak, ...]:
    """Return the peak rates of all devices: as the cluster has them, or of this rank's data sheet if all are alike."""
    devices = [problem.cluster.device(rank) for rank in range(problem.cluster.ranks)]
    rates = [each.rates for each in devices if each.rates is not None]
    if len(rates) == len(devices):
        return tuple(rate.peak_of for rate in rates)
    if device.type != "cuda" or len({each.kind for each in devices}) > 1:
        return (lambda dtype: 0.0,)

    @cache
    def peak(dtype: str) -> float:
        kind = getattr(torch, dtype, None)  # none of what is replayed
        return (get_available_flops(device, kind) or 0.0) if isinstance(kind, torch.dtype) else 0.0

    return (peak,) * len(devices)
